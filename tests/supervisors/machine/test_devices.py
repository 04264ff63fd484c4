"""Which devices a machine is found to have, what ``--devices`` makes of that, and what a process sees of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from configs.limits import DEFAULT_LIMITS
from supervisors.machine import devices
from supervisors.machine.devices import NO_DEVICES, Devices, find_devices
from supervisors.tree.errors import NoSuchDevices
from tests.supervisors.machine.fake_driver import fake_driver, fake_nvidia_smi, instance_of, uuid_of

FOUR = ("0", "1", "2", "3")


class World:
    """A machine with so many GPUs, each undivided or in so many parts."""

    def __init__(self, tmp_path: Path, *gpus: int) -> None:
        self.path = fake_nvidia_smi(tmp_path / "bin", gpus)

    def find(self, option: str | None = None, **environ: str) -> Devices:
        return find_devices(option, {"PATH": self.path, **environ}, Path("/nowhere"))


@pytest.fixture
def four(tmp_path: Path) -> World:
    return World(tmp_path, 0, 0, 0, 0)


def test_a_machine_without_a_driver_has_none_and_nothing_is_set_for_its_processes(tmp_path: Path) -> None:
    found = find_devices(None, {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path / "none")
    assert found == NO_DEVICES
    assert found.environment(None) == {}


def test_torch_is_not_imported_to_find_them(four: World) -> None:
    four.find()
    assert "torch" not in vars(devices)
    text = Path(devices.__file__).read_text("utf-8")
    assert "import torch" not in text


def test_nvidia_smi_says_which_gpus_there_are_and_processes_count_them_as_it_does(four: World) -> None:
    found = four.find()
    assert found.ids == FOUR
    assert found.environment(None) == {}
    assert found.environment(("2",)) == {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.environment(()) == {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_an_order_that_the_user_has_chosen_stays(four: World) -> None:
    assert four.find(CUDA_DEVICE_ORDER="FASTEST_FIRST").environment(("2",)) == {"CUDA_VISIBLE_DEVICES": "2"}


def test_a_divided_gpu_is_its_instances(tmp_path: Path) -> None:
    world = World(tmp_path, 0, 2)
    assert world.find().ids == ("0", instance_of(1, 0), instance_of(1, 1))
    assert world.find("2").ids == ("0", instance_of(1, 0))
    assert world.find(f"{instance_of(1, 1)}").ids == (instance_of(1, 1),)


def test_where_nvidia_smi_is_missing_or_broken_the_driver_is_asked(tmp_path: Path) -> None:
    driver = fake_driver(tmp_path / "driver", 2)
    assert find_devices(None, {"PATH": str(tmp_path)}, driver).ids == ("0", "1")
    broken = fake_nvidia_smi(tmp_path / "bin", [0], code=9)
    assert find_devices(None, {"PATH": broken}, driver).ids == ("0", "1")


def test_an_nvidia_smi_that_hangs_does_not_keep_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEFAULT_LIMITS", DEFAULT_LIMITS.model_copy(update={"device_search_s": 0.1}))
    path = fake_nvidia_smi(tmp_path / "bin", [0], pause_s=0.5)
    assert find_devices(None, {"PATH": path}, tmp_path / "none").ids == ()


@pytest.mark.parametrize(
    ("variable", "ids"),
    [
        ("2,3", ("2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,-1,0", ("1",)),
        ("1,7,0", ("1",)),
        (" 1 , 0 ", ("1", "0")),
        ("1,1", ("1",)),
        (uuid_of(2), (uuid_of(2),)),
        ("GPU-00000001", (uuid_of(1),)),
        ("GPU-0", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(four: World, variable: str, ids: tuple[str, ...]) -> None:
    """Up to the first that is not there; so much of an id is enough that it is the only one."""
    found = four.find(CUDA_VISIBLE_DEVICES=variable)
    assert found.ids == ids
    assert "CUDA_DEVICE_ORDER" not in found.environment(("2",)), "their numbers keep their meaning"


def test_where_only_the_driver_s_files_are_there_the_variable_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_DRIVER_FILES", (tmp_path,))
    environ = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": f"1,{uuid_of(5)},no"}
    assert find_devices(None, environ, tmp_path / "none").ids == ("1", uuid_of(5))


@pytest.mark.parametrize(
    ("option", "ids"),
    [
        ("2", ("0", "1")),
        ("4", FOUR),
        ("0,2", ("0", "2")),
        ("3,", ("3",)),
        (uuid_of(3), ("3",)),
        ("none", ()),
    ],
)
def test_the_option_takes_a_number_ids_or_none(four: World, option: str, ids: tuple[str, ...]) -> None:
    found = four.find(option)
    assert found.ids == ids
    assert found.environment(None)["CUDA_VISIBLE_DEVICES"] == ",".join(ids), "nothing of the machine sees another one"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("5", "--devices is 5, but this machine has 0, 1, 2, 3. Ask for at most 4"),
        ("1,7", "--devices names 7, but this machine has 0, 1, 2, 3. Name devices of these, or leave it out"),
        ("GPU-77", "--devices names GPU-77, but this machine has 0, 1, 2, 3. Name devices of these, or leave it out"),
        (
            "0",
            "--devices is '0', expected a number of devices from 1, or their ids with commas (0,2; a single one: 2,)",
        ),
        ("cuda:1", "--devices is 'cuda:1', expected a number of devices from 1"),
        ("", "--devices is '', expected a number of devices from 1"),
        ("1,1", "--devices is '1,1', and names one twice; expected"),
        (f"1,{uuid_of(1)}", "and names one twice; expected"),
    ],
)
def test_what_the_machine_does_not_have_is_refused_in_a_sentence(four: World, option: str, sentence: str) -> None:
    with pytest.raises(NoSuchDevices) as refused:
        four.find(option)
    assert sentence in str(refused.value)


def test_the_option_chooses_among_what_cuda_visible_devices_leaves(four: World) -> None:
    assert four.find("1", CUDA_VISIBLE_DEVICES="3,2").ids == ("3",)
    with pytest.raises(NoSuchDevices, match="names 0, but CUDA_VISIBLE_DEVICES names 3, 2"):
        four.find("0,", CUDA_VISIBLE_DEVICES="3,2")


def test_a_number_of_devices_on_a_machine_without_any_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(
        NoSuchDevices, match=r"--devices is 2, but this machine has none \(nvidia-smi -L .*Leave it out"
    ):
        find_devices("2", {"PATH": str(tmp_path)}, tmp_path / "none")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_is_searched_without_an_error() -> None:
    assert isinstance(find_devices(None), Devices)
    assert find_devices("none", os.environ).environment(None) == {"CUDA_VISIBLE_DEVICES": ""}
