"""A33: what runs beside training is a fresh process, or C code that leaves Python's lock free.

Times are printed and not judged: what a test machine does meanwhile is no property of the code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.support.tiny import Managers

STEPS = """
import json, os, signal, sys, time, torch, moc
torch.set_num_threads(2)
a = torch.randn(256, 256)
a @ a                                    # from here on OpenMP's threads live
model = torch.nn.ParameterList(torch.randn(1000) for _ in range(2000))
policy = moc.Policy(snapshot_every=10**9, persist_every=10**9, keep_latest_k=None)
manager = moc.CheckpointManager(sys.argv[1], model=model, memory_dir=sys.argv[2], policy=policy)
threads = len(os.listdir("/proc/self/task"))
manager.restore()

def helper():
    return manager._saver._handover._helper.pid

def described(pid):
    proc = f"/proc/{pid}/"
    maps = open(proc + "maps").read()
    return {
        "exe": os.readlink(proc + "exe"),
        "words": open(proc + "cmdline", "rb").read().decode().split("\\0"),
        "torch": "libtorch" in maps,
        "openmp": "libgomp" in maps,
        "threads": len(os.listdir(proc + "task")),
    }

def steps(n, busy=lambda: True):
    times = []
    while len(times) < n and busy():
        began = time.perf_counter()
        for _ in range(4):
            a @ a
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times) or [0.0]

told = {}
manager.save(1)
manager.wait()
pids = [helper()]
told["helpers"] = [described(pids[0])]
alone, beside = steps(50), []
for step in range(2, 6):
    manager.save(step)
    fate = manager._saver._handover
    def busy():
        fate.listen()
        return fate.committed < step
    beside += steps(1000, busy)
    manager.wait()
os.kill(pids[0], signal.SIGKILL)         # the next one starts beside all threads, too
os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
manager.save(6)
manager.save(7)
manager.wait()
pids.append(helper())
told["helpers"].append(described(pids[1]))
told["alone"] = [alone[len(alone) // 2], alone[-1]]
beside.sort()
told["beside"] = [beside[len(beside) // 2], beside[-1]]
told["stall"] = max(manager.stats()["stall_secs"].values())
told["committed"] = manager.latest_step()
told["threads"] = threads
told["pids"] = pids
manager.close()
print(json.dumps(told))
"""

LOCK = """
import json, sys, threading, torch
from moc.core.digest import digest_bytes
from moc.snapshot.copier import run_copies
torch.set_num_threads(1)
sys.setswitchinterval(1000)  # who has the lock keeps it until it gives it up by itself

def leaves_lock_free(work):
    for _ in range(20):  # the other thread may be late; one that has no chance never comes first
        began, done = threading.Lock(), []
        began.acquire()
        def task():
            began.release()
            work()
            done.append(True)
        thread = threading.Thread(target=task)
        thread.start()
        began.acquire()
        came_first = not done
        thread.join()
        if came_first:
            return True
    return False

data = bytes(64 << 20)
view = memoryview(data)
sources = [torch.zeros(4 << 20) for _ in range(4)]
pairs = [(torch.empty_like(t), t) for t in sources]
print(json.dumps({
    "digest": leaves_lock_free(lambda: digest_bytes(view)),
    "copy": leaves_lock_free(lambda: run_copies(pairs)),
    "python": leaves_lock_free(lambda: data.count(b"x")),
}))
"""


def run(script: str, *words: object) -> dict[str, Any]:
    """What a script prints, run with faulthandler; it must have nothing to tell."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert "Fatal Python error" not in done.stderr
    assert "Current thread" not in done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.dist
def test_a33_the_helper_is_a_fresh_interpreter(managers: Managers) -> None:
    told = run(STEPS, managers.run, managers.memory_dir)
    for name in ("alone", "beside"):
        median, worst = told[name]
        print(f"{name}: median step {median:.2f} ms, worst {worst:.2f} ms")
    print(f"longest stall {1e3 * told['stall']:.2f} ms")
    assert told["threads"] > 1  # a fork of this would have been one of a threaded process
    assert told["pids"][0] != told["pids"][1]
    assert told["committed"] >= 6
    for helper in told["helpers"]:
        assert helper["exe"] == os.path.realpath(sys.executable)
        assert helper["words"][1:3] == ["-m", "moc.persist.agent"]
        assert not helper["torch"]
        assert not helper["openmp"]
        assert helper["threads"] == 1


def test_a33_copies_and_digests_leave_the_lock_free() -> None:
    told = run(LOCK)
    assert not told.pop("python")  # what keeps it is told apart
    assert told == {"digest": True, "copy": True}
