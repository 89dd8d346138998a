"""Time flows with SimGrid, for tests: run by Debian's own Python, which has python3-simgrid.

Reads JSON from stdin: {"rate": bytes/s, "flows": [[send port, receive port, bytes], ...]}; all
flows begin at 0. Prints the seconds until the last has ended.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone


def main():
    case = json.load(sys.stdin)
    engine = Engine(
        [
            "flows",
            "--log=root.thres:critical",
            "--cfg=network/model:CM02",
            "--cfg=network/crosstraffic:0",
            "--cfg=network/TCP-gamma:0",
        ]
    )
    zone = NetZone.create_star_zone("star")
    ports = {f"send-{send}" for send, _, _ in case["flows"]}
    ports |= {f"receive-{receive}" for _, receive, _ in case["flows"]}
    for port in sorted(ports):
        host = zone.create_host(port, 1e9)
        link = zone.create_link(f"link-{port}", case["rate"]).set_latency(0).seal()
        zone.add_route(host.netpoint, None, None, None, [LinkInRoute(link)], True)
    boss = zone.create_host("boss", 1e9)
    zone.seal()

    def run():
        comms = [
            Comm.sendto_async(
                Host.by_name(f"send-{send}"), Host.by_name(f"receive-{receive}"), size
            )
            for send, receive, size in case["flows"]
        ]
        Comm.wait_all(comms)
        print(json.dumps(Engine.clock))

    Actor.create("boss", boss, run)
    engine.run()


main()
