#!/usr/bin/env bash
# Run this on every node, with NODE_RANK 0, 1, ... and the same MASTER_ADDR:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node0 docs/launch/torchrun_nodes.sh
#   NODES=2 NODE_RANK=1 MASTER_ADDR=node0 docs/launch/torchrun_nodes.sh
#
# A program and its arguments, or -m and a module, may follow; else it is the example. NODES=1 needs
# neither number nor address. railwave must be installed on all nodes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=localhost}" "${MASTER_PORT:=29500}"
if [ -x .venv/bin/python ]; then here=.venv/bin/python; else here=python3; fi  # as make sets it up
: "${GPUS_PER_NODE:=8}" "${PYTHON:=$here}"
[ $# -gt 0 ] || set -- examples/torchrun_dispatch.py

# The network that hosts meet over (TCP); payload takes the rails. Set it where the default is wrong:
# export GLOO_SOCKET_IFNAME=eth0 NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_ORDER=PCI_BUS_ID               # as railwave topo numbers GPUs
export RAILWAVE_DEADLINE_S="${RAILWAVE_DEADLINE_S:-300}"

if [ "$NODES" = 1 ]; then
    where=(--standalone)
else
    where=(--nnodes="$NODES" --node-rank="$NODE_RANK")
    where+=(--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT")
fi

"$PYTHON" -m railwave doctor --nodes "$NODES"
exec "$PYTHON" -m torch.distributed.run "${where[@]}" --nproc-per-node="$GPUS_PER_NODE" \
    docs/launch/with_rails.py "$@"
