import pytest

from evenstep.errors import ArgumentError
from evenstep.parallel.rank_info import RankInfo, rank_info_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
}


def test_torchruns_variables_are_read() -> None:
    assert rank_info_of(TORCHRUN) == RankInfo(rank=3, ranks=4, local_rank=1, address="alpha", port=29500)
    served = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = rank_info_of(served)
    assert place is not None and place.store_is_served and place.attempt == 2


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("RANK", "one"), ("MASTER_ADDR", " ")])
def test_an_environment_that_cannot_be_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        rank_info_of(TORCHRUN | {name: value})


def test_what_srun_sets_is_read() -> None:
    place = rank_info_of(SRUN)
    assert place is not None
    assert (place.rank, place.ranks, place.local_rank, place.address) == (5, 8, 1, "gpu07")
    assert place.port == rank_info_of(SRUN | {"SLURM_PROCID": "0"}).port  # type: ignore[union-attr] - the same for all
    assert place.port != rank_info_of(SRUN | {"SLURM_JOB_ID": "124"}).port  # type: ignore[union-attr]


def test_torchrun_inside_srun_counts_and_so_does_an_address_of_ones_own() -> None:
    assert rank_info_of(SRUN | TORCHRUN) == rank_info_of(TORCHRUN)
    place = rank_info_of(SRUN | {"MASTER_ADDR": "beta", "MASTER_PORT": "1234"})
    assert place is not None and (place.address, place.port) == ("beta", 1234)


def test_neither_a_lonely_process_nor_a_batch_script_is_a_rank() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    for variables in ({}, {"MASTER_ADDR": "alpha", "LOCAL_RANK": "0"}, batch):
        assert rank_info_of(variables) is None
