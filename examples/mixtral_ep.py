"""Train a small Mixtral whose experts are spread over ranks, and the same model in one process.

    torchrun --nproc-per-node=4 examples/mixtral_ep.py

Four ranks stand for 2 nodes of 2 GPUs, on CPUs. Each has a quarter of the experts, all else of the
model, and a quarter of the batch; so gradients are summed over ranks, but not those of experts, to
which the tokens of all ranks come. Every rank also trains the plain model on the whole batch:
losses, gradients and parameters must agree at every step. Weights are random; nothing is fetched.
The router's auxiliary loss is off, as by default: that of a batch is no mean over its parts.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import railwave

NODES, BATCH, SEQUENCE, LEARNING_RATE = 2, 8, 8, 0.1
# Of a tensor's largest entry. Sums of float32 run in another order here, and steps widen what that
# makes: 20 of these reach 2e-6 where the plain model takes the batch in four parts, in one process.
TOLERANCE = 1e-5

CONFIG = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=SEQUENCE,
    initializer_range=0.1,
)


class SpreadExperts(nn.Module):
    """Stand in for a layer's MixtralExperts: hold some of them, reach the others by railwave."""

    def __init__(self, experts, mine):
        super().__init__()
        self.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[mine].clone())
        self.down_proj = nn.Parameter(experts.down_proj.detach()[mine].clone())
        self.act_fn = experts.act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        received = railwave.dispatch(hidden_states, top_k_index, top_k_weights)
        out = torch.zeros_like(received.x)
        # An expert without rows runs too: then gradients are needed on all ranks alike.
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            row, k = (received.topk_idx == e).nonzero(as_tuple=True)  # ids are local to the rank
            gate, up = nn.functional.linear(received.x[row], gate_up).chunk(2, dim=-1)
            result = nn.functional.linear(self.act_fn(gate) * up, down)
            out = out.index_add(0, row, result * received.topk_weights[row, k, None])
        return railwave.combine(out, received.handle)


def spread(model, mine):
    """Return a copy of the model with only this rank's experts; the routers stay its own."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp.experts = SpreadExperts(layer.mlp.experts, mine)
    return model


def difference(found, wanted):
    """Return the largest difference, relative to the largest entry wanted; inf where NaN."""
    largest = (found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return largest.nan_to_num(nan=torch.inf).item()


def compare(model, whole, mine):
    """Return the largest differences of gradients and of parameters, of those that are here."""
    gradients, parameters = 0.0, 0.0
    for name, found in model.named_parameters():
        wanted = whole.get_parameter(name)
        part = mine if ".experts." in name else ...
        gradients = max(gradients, difference(found.grad, wanted.grad[part]))
        parameters = max(parameters, difference(found.detach(), wanted.detach()[part]))
    return gradients, parameters


def train(rank, ranks, steps):
    """Train both models; return their last losses and the largest differences on any rank."""
    share = CONFIG.num_local_experts // ranks
    mine = slice(rank * share, (rank + 1) * share)
    # The same on every rank. No token of this seed is so near a tie that rounding could route it.
    torch.manual_seed(1)
    whole = MixtralForCausalLM(CONFIG)
    model = spread(whole, mine)
    of_model = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    of_whole = torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE)
    largest = torch.zeros(3)
    for _ in range(steps):
        # Sequences that count upwards from random starts; every rank draws the whole batch.
        starts = torch.randint(CONFIG.vocab_size, (BATCH, 1))
        tokens = (starts + torch.arange(SEQUENCE)) % CONFIG.vocab_size

        of_whole.zero_grad()
        whole_loss = whole(tokens, labels=tokens).loss
        whole_loss.backward()
        of_whole.step()

        of_model.zero_grad()
        tokens = tokens.chunk(ranks)[rank]
        loss = model(tokens, labels=tokens).loss / ranks  # its part of the mean over the batch
        loss.backward()
        for name, parameter in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(parameter.grad)
        of_model.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        found = [difference(loss, whole_loss.detach()), *compare(model, whole, mine)]
        largest = largest.maximum(torch.tensor(found))
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return loss.item(), whole_loss.item(), largest.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)  # one process a core is enough
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks not in (2, 4, 8):
        raise SystemExit(f"this example needs 2, 4 or 8 processes, got {ranks}")
    with railwave.init(
        railwave.Topology(NODES, ranks // NODES, ranks // NODES),
        num_experts=CONFIG.num_local_experts,
        top_k=CONFIG.num_experts_per_tok,
        hidden=CONFIG.hidden_size,
        max_tokens_per_rank=BATCH // ranks * SEQUENCE,
        dtype=torch.float32,
        device="cpu",
        deadline_s=60,
    ):
        loss, whole_loss, largest = train(rank, ranks, steps)
    if rank == 0:
        said = "losses {:.1e}, gradients {:.1e}, parameters {:.1e}".format(*largest)
        print(
            f"{ranks} ranks, {steps} steps; loss {loss:.6f}, of one process {whole_loss:.6f}; "
            f"largest relative difference: {said}"
        )
    dist.destroy_process_group()
    if not max(largest) < TOLERANCE:
        raise SystemExit(f"the models differ by more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
