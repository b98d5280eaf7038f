"""The loop's small parts: progress, joint stopping, joining a job, the clock of a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Rank, run_ranks
from slipstream.cluster import Cluster
from slipstream.errors import CheckpointError, LaunchError, SlipstreamError
from slipstream.sync import BucketTimes, StepTimeline
from slipstream.train.distributed import Job, join_job
from slipstream.train.progress import Progress, Totals
from slipstream.train.record.spans import StepClock
from slipstream.train.stopping import StopAgreement
from training_runs import Request, job_of


def test_progress_survives_a_checkpoint() -> None:
    progress = Progress(step=7, updates=6, epochs=1, test_accuracy=0.5, train_seconds=2.5)
    progress.run.add(Totals(steps=6, loss=3.0, correct=5, samples=12, seconds=1.5))
    progress.epoch.add(Totals(steps=1, loss=0.5, samples=2))
    counters = progress.to_counters()
    assert Progress.from_counters(counters, "c") == progress
    assert progress.skipped_steps == 1
    assert progress.run.mean_loss == 0.5
    assert progress.run.images_per_second == 8.0
    assert progress.run.step_seconds == 0.25


@pytest.mark.parametrize(
    "change",
    [{"steps": 3}, {"updates": 9}, {"run": {"no": 1}}, {"run": None}, {"updates": None}],
)
def test_foreign_counters_are_refused(change: dict[str, object]) -> None:
    counters = Progress(step=7, updates=6).to_counters() | change
    with pytest.raises(CheckpointError, match="the old run"):
        Progress.from_counters(counters, "the old run")


def test_means_of_nothing_are_no_numbers_and_rates_of_nothing_are_zero() -> None:
    nothing = Totals()
    assert nothing.mean_loss != nothing.mean_loss
    assert nothing.accuracy != nothing.accuracy
    assert nothing.images_per_second == 0.0


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_all_ranks_stop_after_the_same_step(world_size: int, every: int) -> None:
    def body(rank: Rank) -> int:
        request = Request()
        stop = StopAgreement(job_of(rank), request, seconds_apart=float(every))
        stop.pace(1.0)
        for step in range(1, 30):
            request.requested = request.requested or (rank.rank == world_size - 1 and step == 7)
            if stop.reached(step):
                stop.close()
                return step
        raise AssertionError("nobody stopped")

    steps = run_ranks(body, world_size)
    assert len(set(steps)) == 1
    assert 7 <= steps[0] <= 7 + every


def simulated_delay(job: Job, told_step: int) -> float:
    """Seconds from a request at the start of `told_step` on the last rank to the end of training.

    On a simulated clock: steps of 20 to 23 ms, by which questions are paced every tenth step, as
    log lines do, so that their distance is another one each time.
    """
    request = Request()
    stop = StopAgreement(job, request)
    now_seconds = told_seconds = 0.0
    window: list[float] = []
    for step in range(1, 1000):
        if step == told_step:
            told_seconds = now_seconds
            request.requested = job.rank == job.world_size - 1
        window.append(0.020 + 0.0005 * (step // 10 * 3 % 7))
        now_seconds += window[-1]
        if step % 10 == 0:
            stop.pace(sum(window) / len(window))
            window.clear()
        if stop.reached(step):
            stop.close()
            return now_seconds - told_seconds
    raise AssertionError("nobody stopped")


def test_a_request_is_seen_within_a_second_whatever_the_pace_of_steps() -> None:
    def body(rank: Rank) -> list[float]:
        job = job_of(rank)
        return [simulated_delay(job, told_step) for told_step in range(60, 300, 24)]

    delays = run_ranks(body, 2)
    assert delays[0] == delays[1]
    # A second as it was measured over the last ten steps, and the step of the answer.
    assert max(delays[0]) <= 1.0 * 23 / 20 + 0.023


def test_a_pace_that_slows_down_brings_the_next_question_forward() -> None:
    def body(rank: Rank) -> int:
        request = Request()
        stop = StopAgreement(job_of(rank), request)
        stop.pace(0.001)  # the next question would be a thousand steps away
        for step in range(1, 100):
            if step == 20:
                request.requested = True
                stop.pace(0.5)
            if stop.reached(step):
                stop.close()
                return step
        raise AssertionError("nobody stopped")

    assert run_ranks(body, 2) == [21, 21]


def test_nobody_stops_unasked() -> None:
    def body(rank: Rank) -> bool:
        stop = StopAgreement(job_of(rank), Request())
        reached = any([stop.reached(step) for step in range(1, 20)])
        stop.close()
        return reached

    assert run_ranks(body, 2) == [False, False]


def test_one_rank_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with join_job(Cluster((1,)), timeout_seconds=5) as job:
        assert job.rank == 0 and job.world_size == 1 and job.group is None


def test_a_cluster_of_another_size_than_the_job_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(LaunchError, match="3 ranks but the cluster has 4"),
        join_job(Cluster((2, 2)), timeout_seconds=5),
    ):
        pass


def test_ranks_that_do_not_meet_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(LaunchError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:1 within 1 s"),
        join_job(Cluster((2,)), timeout_seconds=1),
    ):
        pass


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_rank_0_cannot_do_fails_all(world_size: int) -> None:
    def body(rank: Rank) -> tuple[list[int], str]:
        job = job_of(rank)
        ran: list[int] = []
        job.on_rank_zero(lambda: ran.append(rank.rank), "trying")

        def fail() -> None:
            raise SlipstreamError("the disk is full")

        with pytest.raises(SlipstreamError) as caught:
            job.on_rank_zero(fail, "trying again")
        return ran, str(caught.value)

    outcomes = run_ranks(body, world_size)
    assert [ran for ran, _ in outcomes] == [[0], *[[]] * (world_size - 1)]
    assert {text for _, text in outcomes} == {"the disk is full"}


def test_the_clock_cuts_a_step_into_spans() -> None:
    def readings() -> Iterator[float]:
        yield from (0.0, 10.0, 10.5, 12.0, 15.0)

    clock = StepClock(iter(readings()).__next__)
    clock.begin()
    assert clock.cut("input", "wait for input") == 0.5
    assert clock.cut("forward") == 1.5
    assert clock.cut("backward") == 3.0
    assert clock.seconds == 5.0
    bucket = BucketTimes(0, 4096, ready_seconds=13.0, start_seconds=13.5, end_seconds=14.0)
    record = clock.record(3, StepTimeline((bucket,), 0.0))
    assert record["kind"] == "timeline" and record["step"] == 3
    cut = [
        (span["row"], span["name"], span["start_seconds"], span["end_seconds"])
        for span in record["spans"]
    ]
    assert cut == [
        ("input", "wait for input", 0.0, 0.5),
        ("forward", "forward", 0.5, 2.0),
        ("backward", "backward", 2.0, 5.0),
        ("communication", "bucket 0", 3.5, 4.0),
    ]
    assert record["spans"][-1]["bytes"] == 4096


def test_a_step_whose_round_ends_in_the_next_one_is_recorded_with_the_gathers_in_it() -> None:
    readings = iter([0.0, 10.0, 11.0, 14.0, 15.0, 20.0, 21.0])
    clock = StepClock(readings.__next__)
    clock.begin()
    for row in ("forward", "backward", "update"):
        clock.cut(row)
    clock.begin()
    clock.cut("forward")

    def bucket(start: float, end: float) -> BucketTimes:
        return BucketTimes(0, 4, ready_seconds=start, start_seconds=start, end_seconds=end)

    earlier = StepTimeline((bucket(2.0, 3.0),), 0.0, (bucket(9.0, 10.5), bucket(8.0, 9.0)))
    timeline = StepTimeline((bucket(12.0, 13.0),), 0.0, (bucket(14.5, 20.5), bucket(20.0, 21.0)))
    record = clock.record(2, timeline, earlier)
    assert record["step"] == 1
    spans = [(s["row"], s["name"], s["start_seconds"], s["end_seconds"]) for s in record["spans"]]
    assert spans == [
        ("forward", "forward", 0.0, 1.0),
        ("backward", "backward", 1.0, 4.0),
        ("update", "update", 4.0, 5.0),
        ("communication", "gather 0", 0.0, 0.5),
        ("communication", "bucket 0", 2.0, 3.0),
        ("communication", "gather 0", 4.5, 10.5),
    ]


def test_a_single_rank_sums_to_itself() -> None:
    job = Job(0, Cluster((1,)))
    job.on_rank_zero(lambda: None, "doing nothing")
    assert job.peers.gather({"a": 1}, "gathering") == [{"a": 1}]
