"""Small programs that tests run as ranks of a lab; the first argument is a folder to write to."""

_CONNECT = """
import os, socket, sys, time
from pathlib import Path
folder, rank, last = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

def accepted():
    return socket.create_server(ADDRESS).accept()[0]

def connected():
    while True:
        try:
            return socket.create_connection(ADDRESS)
        except ConnectionRefusedError:
            time.sleep(0.02)
"""

PLACE = """
import json, os, socket, sys
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE")}
told["host"] = socket.gethostname()
told["address"] = socket.gethostbyname(socket.gethostname())
told["interfaces"] = sorted(name for _, name in socket.if_nameindex())
open(f"{sys.argv[1]}/{told['RANK']}.json", "w").write(json.dumps(told))
print("rank", told["RANK"])
"""
"""Writes where a rank finds itself to RANK.json, and prints its number."""

TRANSFER_BYTES = 3_000_000
TRANSFER = (
    _CONNECT
    + f"""
if rank == 0:
    peer, start, received = accepted(), time.monotonic(), 0
    while taken := len(peer.recv(1 << 20)):
        received += taken
    assert received == {TRANSFER_BYTES}, received
    (folder / "seconds").write_text(str(time.monotonic() - start))
elif rank == last:
    connected().sendall(bytes({TRANSFER_BYTES}))
"""
)
"""The last rank sends `TRANSFER_BYTES` to the first, which writes how long that took."""

HEARTBEAT = (
    _CONNECT
    + """
if rank == 0:
    peer, beats = accepted(), 0
    peer.settimeout(1.5)
    try:
        while peer.recv(1):
            beats += 1
            (folder / "beats").write_text(str(beats))
    except TimeoutError:
        sys.exit(5)
else:
    peer = connected()
    while True:
        peer.send(b"x")
        time.sleep(0.05)
"""
)
"""Rank 1 sends twenty bytes a second; rank 0 counts them and ends with 5 when they stop coming."""

OBEDIENT = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]

def end(number, frame):
    (folder / f"told-{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)

for name in (signal.SIGINT, signal.SIGTERM):
    signal.signal(name, end)
(folder / f"ready-{rank}").touch()
time.sleep(600)
"""
"""Waits for a signal, writes its name to told-RANK, and ends in order."""

STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: (folder / f"told-{rank}").touch())
sleeper = [sys.executable, "-c", "import time; time.sleep(600)", str(folder)]
subprocess.Popen(sleeper, start_new_session=True)
(folder / f"ready-{rank}").touch()
while True:
    time.sleep(600)
"""
"""Ignores signals, and has a child that left its session."""

ALL_REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
values = torch.full((250_000,), float(dist.get_rank() + 1))
dist.all_reduce(values)
print("sum", values.min().item(), values.max().item(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""
"""One all-reduce of a megabyte over the default group."""
