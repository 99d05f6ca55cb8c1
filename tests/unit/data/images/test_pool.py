"""The decoder pool with real processes: failures it survives, and that no process is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from stretto.data.images import decoder_pool as module
from stretto.data.images import decoder_pool as process
from stretto.data.images.config import Form
from stretto.data.images.decoder import PIXELS
from stretto.data.images.decoder_pool import DecodeFailure, DecoderPool
from stretto.errors import StrettoError
from tests.unit.data.images.deaths import ask_when_ready, kill_when_asked
from tests.unit.data.images.pictures import CORRUPT, encoded, fill, jpeg, noise

pytestmark = pytest.mark.multi
SIDE = 16


@pytest.fixture
def pool():
    with closing(DecoderPool(2, form=Form(SIDE), max_pixels=10**8)) as pool:
        yield pool


def paths(folder, contents):
    fill(folder, {f"{i}.jpg": content for i, content in enumerate(contents)})
    return [os.fsencode(folder / f"{i}.jpg") for i in range(len(contents))]


def red(content, side=SIDE):
    return int(np.frombuffer(content, np.uint8).reshape(side, side, 3)[side // 2, side // 2, 0])


def wait_until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_results_are_in_the_order_of_the_paths(tmp_path, pool):
    contents = [jpeg(i) for i in range(16)]
    contents[3], contents[9] = CORRUPT["text"], CORRUPT["empty"]
    answers = pool.decode(paths(tmp_path, contents))
    assert answers[9] == DecodeFailure("empty file", is_permanent=True)
    assert "not an image" in answers[3].reason
    good = [i for i in range(16) if i not in (3, 9)]
    assert [red(answers[i]) // 16 for i in good] == good


@pytest.mark.parametrize("kind", list(CORRUPT))
def test_failures_of_corrupt_files_are_permanent(tmp_path, pool, kind):
    (failure,) = pool.decode(paths(tmp_path, [CORRUPT[kind]]))
    assert failure.is_permanent


def test_the_failure_of_a_missing_file_is_not_permanent(tmp_path, pool):
    (failure,) = pool.decode([os.fsencode(tmp_path / "gone.jpg")])
    assert failure == DecodeFailure("cannot be read: No such file or directory", is_permanent=False)


def test_as_many_decoders_are_started_as_there_are_files(tmp_path, pool):
    files = paths(tmp_path, [jpeg()] * 9)
    pool.decode(files[:1])
    assert len(pool.pids) == 1
    pool.decode(files)
    assert len(pool.pids) == 2


def test_decoders_are_kept_from_batch_to_batch(tmp_path, pool):
    files = paths(tmp_path, [jpeg()] * 4)
    pool.decode(files)
    before = pool.pids
    pool.decode(files)
    assert pool.pids == before


def test_large_requests_and_replies_do_not_deadlock(tmp_path):
    # Replies of 3 MB and requests of 4 KB: both are more than a pipe of 64 KB holds at once.
    deep = tmp_path.joinpath(*["d" * 200] * 18)
    files = paths(deep, [encoded(noise(1200, 1000, seed), "JPEG") for seed in range(2)]) * 20
    with closing(DecoderPool(1, form=Form(1000), max_pixels=10**8)) as pool:
        answers = pool.decode(files)
    assert {len(answer) for answer in answers} == {3 * 1000**2}


def test_requests_that_do_not_fit_into_the_pipe_wait_without_blocking(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_PER_DECODER", 1000)
    deep = tmp_path.joinpath(*["d" * 200] * 18)
    files = paths(deep, [jpeg()]) * 200
    with closing(DecoderPool(1, form=Form(200), max_pixels=10**8)) as pool:
        assert {red(answer, 200) // 16 for answer in pool.decode(files)} == {0}


def test_a_decoder_killed_between_batches_is_replaced(tmp_path, pool):
    files = paths(tmp_path, [jpeg(i) for i in range(6)])
    pool.decode(files)
    killed = pool.pids[0]
    os.kill(killed, signal.SIGKILL)
    assert [red(a) // 16 for a in pool.decode(files)] == list(range(6))
    assert killed not in pool.pids


def test_a_decoder_killed_during_a_batch_is_replaced_and_nothing_is_lost(
    tmp_path, pool, monkeypatch
):
    files = paths(tmp_path, [jpeg(i) for i in range(12)])
    pool.decode(files)
    deaths = iter([True])
    kill_when_asked(monkeypatch, lambda path: path == files[5] and next(deaths, False))
    assert [red(a) // 16 for a in pool.decode(files)] == list(range(12))
    assert next(deaths, None) is None  # the kill happened


def test_only_the_file_that_kills_two_decoders_fails(tmp_path, monkeypatch):
    files = paths(tmp_path, [jpeg(i) for i in range(12)])
    with closing(DecoderPool(1, form=Form(SIDE), max_pixels=10**8)) as pool:
        pool.decode(files)
        # One request at a time, so that the decoder dies of the requested file.
        monkeypatch.setattr(module, "MAX_PENDING_PER_DECODER", 1)
        ask_when_ready(monkeypatch)
        kill_when_asked(monkeypatch, lambda path: path == files[5])
        answers = pool.decode(files)
    assert answers[5] == DecodeFailure("killed the decoder twice (signal 9)", is_permanent=False)
    assert all(isinstance(a, bytes) for i, a in enumerate(answers) if i != 5)


def test_the_failure_of_a_file_without_a_reply_is_not_permanent(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REPLY_TIMEOUT_S", 2.0)
    files = paths(tmp_path, [jpeg(i) for i in range(4)])
    os.mkfifo(tmp_path / "pipe.jpg")  # nobody will ever write to it
    with closing(DecoderPool(1, form=Form(SIDE), max_pixels=10**8)) as pool:
        *good, failed = pool.decode([*files, os.fsencode(tmp_path / "pipe.jpg")])
    assert failed == DecodeFailure(
        "killed the decoder twice (no answer for 2 s)", is_permanent=False
    )
    assert [red(a) // 16 for a in good] == list(range(4))


def script(monkeypatch, tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    monkeypatch.setattr(process, "SCRIPT", path)


def test_decoders_that_end_before_they_are_ready_stop_the_run(tmp_path, pool, monkeypatch):
    script(monkeypatch, tmp_path, "raise SystemExit(7)")
    with pytest.raises(StrettoError, match=r"cannot be started.* exit code 7"):
        pool.check_startup()
    assert pool.pids == []


def test_a_pillow_that_cannot_be_imported_is_reported(tmp_path, pool, monkeypatch):
    real = process.SCRIPT.read_text()
    broken = real.replace("from PIL import Image\n", "from PIL import Absent as Image\n")
    script(monkeypatch, tmp_path, broken)
    with pytest.raises(StrettoError, match=r"cannot work: cannot import name 'Absent'.*pillow"):
        pool.check_startup()


def test_a_python_that_cannot_be_started_is_reported(pool, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StrettoError, match="cannot start a process to decode images"):
        pool.check_startup()


def test_an_interrupt_leaves_no_replies_for_the_next_batch(tmp_path, pool, monkeypatch):
    files = paths(tmp_path, [jpeg(i) for i in range(12)])
    receive, replies = process.DecoderProcess.receive, []

    def interrupted(decoder):
        for status, content in receive(decoder):
            yield status, content
            replies.append(status)
        if replies.count(PIXELS) > 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process.DecoderProcess, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.decode(files)
    assert [red(a) // 16 for a in pool.decode(files[::-1])] == list(range(12))[::-1]


def test_stop_signals_do_not_end_a_decoder(tmp_path, pool):
    files = paths(tmp_path, [jpeg(i) for i in range(8)])
    pool.decode(files)
    before = pool.pids
    for pid in before:
        for name in ("INT", "TERM", "HUP", "USR1", "USR2"):
            os.kill(pid, getattr(signal, f"SIG{name}"))
    assert [red(a) // 16 for a in pool.decode(files)] == list(range(8))
    assert pool.pids == before


def test_a_stop_signal_does_not_end_a_decoder_during_its_start(tmp_path, pool, monkeypatch):
    create, started = process.DecoderProcess.__init__, []

    def create_and_stop(decoder, *settings):
        create(decoder, *settings)
        os.kill(decoder.pid, signal.SIGTERM)
        started.append(decoder.pid)

    monkeypatch.setattr(process.DecoderProcess, "__init__", create_and_stop)
    pool.decode(paths(tmp_path, [jpeg()]))
    assert pool.pids == started
    assert len(started) == 1


def test_decoders_outlive_the_thread_that_requested_them(tmp_path, pool):
    import threading

    files = paths(tmp_path, [jpeg(i) for i in range(8)])
    asker = threading.Thread(target=pool.decode, args=(files,))
    asker.start()
    asker.join()
    before = pool.pids
    assert len(pool.decode(files)) == 8
    assert pool.pids == before


def test_no_process_and_no_thread_is_left_after_closing(tmp_path):
    import threading

    pool = DecoderPool(2, form=Form(SIDE), max_pixels=10**8)
    pool.decode(paths(tmp_path, [jpeg()] * 8))
    pids = pool.pids
    pool.close()
    assert all(is_gone(pid) for pid in pids)
    assert [t for t in threading.enumerate() if t.name.startswith("stretto-decoders")] == []


PARENT = """
import sys
from stretto.data.images.config import Form
from stretto.data.images.decoder import PIXELS
from stretto.data.images.decoder_pool import DecoderPool
pool = DecoderPool(2, form=Form(16), max_pixels=10**8)
pool.decode([b""] * 8)
print(*pool.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "stopped"])
def test_decoders_die_with_a_parent_that_is_killed(busy):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        if busy:  # it cannot notice the end of its input: only the parent-death signal ends it
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert len(pids) == 2
        wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_decoder_ends_if_its_parent_died_before_its_start():
    command = [sys.executable, "-P", str(process.SCRIPT), "16", "100", "1"]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_decoder_imports_neither_stretto_nor_torch():
    text = Path(process.SCRIPT).read_text()
    assert "import stretto" not in text
    assert "from stretto" not in text
    assert "torch" not in text
