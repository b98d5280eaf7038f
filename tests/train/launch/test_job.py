"""Whose rank a process is, from the variables that torchrun and srun set."""

import pytest

from slipstream.cluster import Cluster
from slipstream.errors import LaunchError
from slipstream.train.launch.joined import (
    MeetingPoint,
    find_job,
    find_meeting_point,
    first_host,
    shape,
    tasks_per_node,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[003-004,9]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_torchrun_is_recognised() -> None:
    job = find_job(TORCHRUN)
    assert job is not None
    assert (job.starter, job.rank, job.world_size, job.local_rank) == ("torchrun", 5, 8, 1)
    assert (job.node, job.num_nodes, job.local_world_size) == (1, 2, 4)
    assert (job.master_address, job.master_port, job.attempt) == ("node0", 29501, 2)
    assert job.starter_holds_store
    assert job.ranks_per_node == ()
    assert job.variables == {}


def test_torchrun_on_one_node_knows_its_shape() -> None:
    one = without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE") | {"LOCAL_WORLD_SIZE": "8"}
    job = find_job(one)
    assert job is not None
    assert job.ranks_per_node == (8,)
    assert job.node == 0


def test_a_single_rank_needs_no_address() -> None:
    job = find_job({"RANK": "0", "WORLD_SIZE": "1"})
    assert job is not None
    assert (job.world_size, job.ranks_per_node) == (1, (1,))


def test_srun_is_recognised_and_told_to_torch() -> None:
    job = find_job(SRUN)
    assert job is not None
    assert (job.starter, job.rank, job.world_size, job.local_rank, job.node) == ("srun", 3, 5, 1, 1)
    assert job.ranks_per_node == (2, 2, 1)
    assert not job.starter_holds_store
    assert job.variables == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": str(job.master_port),
    }


def test_where_ranks_meet_is_what_the_starter_says() -> None:
    point = find_meeting_point(TORCHRUN)
    assert point == MeetingPoint(5, 8, "node0", 29501, starter_holds_store=True, attempt=2)
    assert point.host == "the launcher at node0:29501"
    job = find_job(TORCHRUN)
    assert job is not None
    assert job.meeting_point == point


def test_without_torchrun_rank_0_is_the_host() -> None:
    job = find_job(SRUN)
    assert job is not None
    point = find_meeting_point(job.variables)
    assert point == job.meeting_point
    assert point.host == f"rank 0 at gpu003:{job.master_port}"
    assert not point.is_host
    assert find_meeting_point({**job.variables, "RANK": "0"}).is_host
    assert not find_meeting_point({**TORCHRUN, "RANK": "0"}).is_host


def test_a_meeting_point_needs_an_address() -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT is not set"):
        find_meeting_point(without(TORCHRUN, "MASTER_PORT"))
    with pytest.raises(LaunchError, match="RANK=8 is not one of WORLD_SIZE=8 ranks"):
        find_meeting_point(TORCHRUN | {"RANK": "8"})


def test_two_steps_of_a_slurm_job_meet_on_two_ports() -> None:
    ports = set()
    for changed in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}):
        job = find_job(SRUN | changed)
        assert job is not None
        ports.add(job.master_port)
        assert 1024 < job.master_port < 2**15
    assert len(ports) == 3


def test_the_users_own_meeting_point_wins() -> None:
    job = find_job(SRUN | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert job is not None
    assert (job.master_address, job.master_port) == ("here", 1234)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    ],
    ids=["nothing", "half", "sbatch script", "srun --pty bash"],
)
def test_elsewhere_there_is_no_job(environ: dict[str, str]) -> None:
    assert find_job(environ) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "GROUP_WORLD_SIZE"), "GROUP_WORLD_SIZE is not set"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is not one of WORLD_SIZE=8 ranks"),
        (TORCHRUN | {"RANK": "x"}, "RANK=x must be a whole number"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "does not add up"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "cannot be read"),
        (SRUN | {"SLURM_NODEID": "0"}, "--distribution=block"),
    ],
)
def test_incomplete_jobs_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        find_job(environ)


def test_task_counts_are_written_out() -> None:
    assert tasks_per_node("4") == (4,)
    assert tasks_per_node("2(x3),1,3(x2)") == (2, 2, 2, 1, 3, 3)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[9,12]", "gpu9"),
        ("rack[1-2]node[04-07]", "rack1node04"),
        ("a-b.c[1-2].d", "a-b.c1.d"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_the_shape_of_a_job_can_be_divided_anew() -> None:
    assert shape((3, 2), None, None) == Cluster((3, 2))
    assert shape((8,), 2, None) == Cluster((4, 4))
    assert shape((8,), None, 2) == Cluster((2, 2, 2, 2))
    assert shape((4, 4), 4, 2) == Cluster((2, 2, 2, 2))


@pytest.mark.parametrize(("nodes", "per_node"), [(3, None), (2, 2), (None, 3), (16, None)])
def test_a_shape_of_another_size_is_refused(nodes: int | None, per_node: int | None) -> None:
    with pytest.raises(LaunchError, match="but the job has 8: leave both out"):
        shape((8,), nodes, per_node)
