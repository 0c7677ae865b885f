"""Pieces of work in several threads: each once, in order, and no setting of others changed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from headstart.runtime.workers import MOST, share_out, worker_count

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    """Torch with two threads, whatever the process has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_as_many_workers_as_threads_and_pieces():
    assert [worker_count(CPU, pieces) for pieces in (0, 1, 2, 9)] == [1, 1, 2, 2]
    assert worker_count(torch.device("meta"), 9) == 2
    assert worker_count(torch.device("cuda"), 9) == 1
    torch.set_num_threads(100)
    assert worker_count(CPU, 1000) == MOST


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_piece_is_done_once(threads):
    torch.set_num_threads(threads)
    done = [[] for _ in range(worker_count(CPU, 100))]
    share_out(lambda own, piece: own.append(piece), range(100), done, CPU)
    assert sorted(piece for own in done for piece in own) == list(range(100))
    assert all(own == sorted(own) for own in done)


def test_two_pieces_are_under_way_at_once():
    meeting = threading.Barrier(2, timeout=30)
    share_out(lambda own, piece: meeting.wait(), range(2), ["one", "other"], CPU)


def test_a_worker_computes_alone_and_without_gradients():
    found = []

    def look(own, piece):
        found.append((torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()))

    share_out(look, range(2), [None], CPU)
    assert {(count, grad) for count, grad, _ in found} == {(1, False)}
    assert threading.get_ident() not in {thread for *_, thread in found}


def test_threads_of_others_keep_their_number():
    share_out(lambda own, piece: None, range(2), [None], CPU)
    found = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [2, 2]


def test_another_device_keeps_to_the_thread_of_the_caller():
    found = []
    share_out(lambda *_: found.append(threading.get_ident()), range(3), [0], torch.device("meta"))
    assert found == [threading.get_ident()] * 3


def test_an_error_is_raised_when_all_have_ended_and_nothing_new_begins():
    begun, ended, meeting = [], [], threading.Barrier(2, timeout=30)

    def work(own, piece):
        begun.append(piece)
        meeting.wait()
        if piece == 0:
            raise ValueError("piece 0")
        time.sleep(0.2)  # the error is seen meanwhile
        ended.append(piece)

    with pytest.raises(ValueError, match="piece 0"):
        share_out(work, range(50), ["one", "other"], CPU)
    assert sorted(begun) == [0, 1]
    assert ended == [1]


@pytest.fixture
def interruptible():
    # A shell lets what it starts in the background ignore interrupts.
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupts", [1, 3])
def test_an_interrupt_is_raised_when_all_have_ended_and_nothing_new_begins(interrupts):
    """Scratch is used again by the next call: whoever still wrote into it would spoil that."""
    begun, ended, meeting = [], [], threading.Barrier(2, timeout=30)

    def work(own, piece):
        begun.append(piece)
        meeting.wait()
        if piece == 0:
            time.sleep(0.1)  # a signal just before a wait begins does not end it
            for _ in range(interrupts):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.01)
        time.sleep(0.3)
        ended.append(piece)

    with pytest.raises(KeyboardInterrupt):
        share_out(work, range(50), ["one", "other"], CPU)
    assert sorted(begun) == sorted(ended) == [0, 1]
    share_out(lambda own, piece: ended.append(piece), range(2, 5), ["one", "other"], CPU)
    assert sorted(ended) == [0, 1, 2, 3, 4]


SERVER = """
import threading, time, torch
from headstart.runtime.workers import share_out

def serve():
    threading.main_thread().join()
    time.sleep(0.2)
    done = []
    share_out(lambda own, piece: done.append(piece), range(4), [0, 1], torch.device("cpu"))
    print(sorted(done), torch.get_num_threads(), flush=True)

torch.set_num_threads(2)
if {first}:
    share_out(lambda own, piece: None, range(2), [0, 1], torch.device("cpu"))
threading.Thread(target=serve).start()
"""


@pytest.mark.parametrize("first", [False, True])
def test_a_thread_that_outlives_the_main_one_computes_on(first):
    found = subprocess.run(
        [sys.executable, "-c", SERVER.format(first=first)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "[0, 1, 2, 3] 2\n"


def test_a_forked_process_has_workers_of_its_own():
    done = []
    share_out(lambda own, piece: done.append(piece), range(3), [None], CPU)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for threads it does not have
        share_out(lambda own, piece: done.append(piece), range(3), [None], CPU)
        os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
