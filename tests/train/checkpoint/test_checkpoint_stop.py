"""StopSignal: a flag at the first signal, the old behaviour at the second, nothing left behind."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from slipstream.train.checkpoint import StopSignal
from slipstream.train.checkpoint import stop as stop_module


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_sets_the_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal(grace_seconds=30) as stop:
        assert not stop.requested
        assert stop.remaining_seconds() == 30
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.cause == number.name
        assert 0 < stop.remaining_seconds() <= 30
        # The launcher passes on what the terminal has sent already: that is no second request.
        os.kill(os.getpid(), number)
        assert stop.cause == number.name
    assert signal.getsignal(number) is before


def test_a_second_signal_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "_SAME_REQUEST_SECONDS", -1.0)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.processes
def test_a_second_sigterm_ends_the_process() -> None:
    program = (
        "import os, signal\n"
        "from slipstream.train.checkpoint import StopSignal, stop\n"
        "stop._SAME_REQUEST_SECONDS = -1.0\n"
        "with StopSignal() as flag:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(flag.cause, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not reached', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "SIGTERM\n"), done.stderr


def test_another_rank_can_ask_too() -> None:
    stop = StopSignal(grace_seconds=0)
    stop.request("rank 3")
    stop.request("rank 4")
    assert (stop.requested, stop.cause, stop.remaining_seconds()) == (True, "rank 3", 0)


def test_in_a_thread_no_handler_is_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with StopSignal() as stop:
            seen.append(signal.getsignal(signal.SIGTERM))
            stop.request("test")
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, True]
