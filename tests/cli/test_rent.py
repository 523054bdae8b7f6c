"""``thrifty rent``: offline, with a small price list."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from tests.cli.documents import check
from thrifty.cli._options import Pair
from thrifty.cli._rent._command import hardware_of, rent_command
from thrifty.cli._rent._output import Installation, installation, script_of, span
from thrifty.cli._rent._rent_options import Dollars, Duration
from thrifty.cli._rent._timed_task import batches_of
from thrifty.cloud import Interval
from thrifty.core import CloudError, MissingExtraError, TaskError, UsageError
from thrifty.pack import DatasetPair, open_source
from thrifty.perf import StepProfile


pytestmark = pytest.mark.slow


STUDY = """
import thrifty as th
from thrifty.testing import LineTask

study = th.Study(
    LineTask(), th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])]), width=th.Int(4, 8)),
    algorithm=th.GridSearch(max_epochs=4), metric="mse", mode="min",
    storage="sqlite:///t.db", name="line",
)
"""
TASK = """
from thrifty.testing import LineTask

class Mine(LineTask):
    def __init__(self, rows: int = 16):
        self.batch_size = rows
"""
PRICES = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,\
AvailabilityZone,Cloud,PricedOn
t4.one,T4,1,4,16,0.5,0.2,east,east-1,aws,2024-06-01
l4.one,L4,1,4,16,0.8,,east,,gcp,2024-05-01
cpu.one,,,4,16,0.2,,east,,aws,2024-06-01
"""
PROFILE = StepProfile(
    device="Tesla T4",
    batches=(8, 16),
    forward_s=(0.1, 0.2),
    backward_s=(0.2, 0.4),
    optimizer_s=0.001,
    peak_bytes=(1e9, 2e9),
    bucket_bytes=(1e6,),
    bucket_ready=(1.0,),
)
KNOWN = ("--profile", "t4.json", "--catalogue", "prices.csv")
LONG = (*KNOWN, "--steps", "100000", "--batch", "16")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "profiles"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    # A profile is only kept if nothing else runs meanwhile.
    monkeypatch.setattr(StepProfile, "is_noisy", property(lambda _: False))
    Path("rented.py").write_text(STUDY)
    Path("bare.py").write_text(TASK)
    Path("prices.csv").write_text(PRICES)
    Path("t4.json").write_text(json.dumps(PROFILE.to_json()))
    return tmp_path


def rent(*args, file="rented.py", answer=None):
    result = CliRunner().invoke(rent_command, [file, *args], input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def data(*args, file="rented.py"):
    lines = rent(*args, "--json", file=file).stdout.splitlines()
    (document,) = (line for line in lines if line.startswith("{"))
    return check(json.loads(document), "rent")


def best(*args, file="rented.py"):
    (machines,) = data(*args, file=file)["best"]["machines"]
    return machines


def test_a_table_and_what_it_rests_on(folder):
    said = rent(*LONG, "--deadline", "2d").stdout
    rows = said.splitlines()
    place = next(i for i, row in enumerate(rows) if row.startswith("→"))
    assert rows[place] == "→ 1 x l4.one (1 L4), gcp east"
    # 16.7 h on a profiled T4; 9.2 h, within a factor of 2.4, on an L4.
    assert re.sub("  +", " | ", rows[place + 1].strip()) == (
        "9.2 h (3.9 to 22.0) | $7.37 (3.09 to 17.62) | batch 16 | compute"
    )
    assert max(map(len, rows[: place + 2])) <= 80
    assert "prices: prices.csv, of 2024-05-01 to 2024-06-01; 3 of 3 offers are older" in said
    assert "timed on Tesla T4" in said
    assert "the speed of L4 is that of data sheets" in said
    assert "considered" in said
    assert "; compute: a step waits for the devices" in said
    assert "input" not in said
    assert "the chosen fleet's price is of 2024-0" in said


def test_a_fleet_that_waits_for_data_is_explained(folder):
    (folder / "t4.json").write_text(json.dumps(replace(PROFILE, sample_input_s=10.0).to_json()))
    said = rent(*LONG, "--deadline", "9999d").stdout
    assert "; input: a step waits for data" in said


def test_micro_batches_where_samples_do_not_fit(folder):
    # 21.1 GiB of the L4 are usable, and a sample needs 0.13 GiB at most.
    large = (*KNOWN, "--steps", "1000", "--batch", "256", "--deadline", "2d", "--max-nodes", "1")
    machines = best(*large)
    assert (machines["device_batch"], machines["micro_batches"]) == (256, 2)
    said = rent(*large).stdout
    assert "batch 2 x 128" in said
    assert "the script has to accumulate gradients" in said
    with pytest.raises(CloudError, match=r"256 samples need 29.8 GiB .*, allow accumulation, or"):
        rent(*large, "--no-accumulation")


def test_mixed_precision_where_it_is_allowed(folder):
    asked = (*LONG, "--deadline", "2d")
    assert best(*asked)["precision"] == "float32"
    assert best(*asked, "--precision", "bfloat16")["precision"] == "bfloat16"
    said = rent(*asked, "--precision", "bfloat16").stdout
    assert "batch 16 in bfloat16" in said
    assert "L4 trains in bfloat16, and the step was measured in float32" in said


def test_a_deadline_and_a_budget(folder):
    quick = best(*LONG, "--deadline", "9h")
    assert (quick["instance_type"], quick["num"]) != ("l4.one", 1)
    assert data(*LONG, "--deadline", "9h")["best"]["time_s"]["high"] <= 9 * 3600
    budget = data(*LONG, "--budget", "$30")["best"]
    assert budget["cost_usd"]["high"] <= 30
    cheap = data(*LONG, "--budget", "12")["best"]
    assert budget["time_s"]["median"] < cheap["time_s"]["median"]
    assert data(*LONG)["best"] is None


def test_the_median_may_be_enough(folder):
    both = [data(*LONG, "--deadline", "9h", *more)["best"] for more in ([], ["--median"])]
    assert both[0]["cost_usd"]["median"] > both[1]["cost_usd"]["median"]
    assert both[1]["time_s"]["median"] <= 9 * 3600 < both[1]["time_s"]["high"]


def test_offers_can_be_restricted(folder):
    loose = (*LONG, "--deadline", "90d")
    assert best(*loose, "--cloud", "aws")["cloud"] == "aws"
    assert best(*loose, "--accelerator", "T4")["instance_type"] == "t4.one"
    assert best(*loose, "--accelerator", "")["instance_type"] == "cpu.one"
    assert best(*loose, "--quota", "L4=0")["accelerator"] != "L4"
    assert best(*loose, "--spot", "--accelerator", "T4")["spot"]
    assert not best(*loose, "--accelerator", "T4")["spot"]
    with pytest.raises(CloudError, match="region"):
        rent(*loose, "--region", "west")
    fronts = [
        data(*LONG, "--accelerator", "T4", "--max-nodes", str(most))["front"] for most in (1, 3)
    ]
    assert [max(f["machines"][0]["num"] for f in front) for front in fronts] == [1, 3]


def test_spot_prices_may_have_a_history(folder):
    Path("spot.csv").write_text(
        "instance_type,az,timestamp,usd_per_hour\nt4.one,east-1,2024-06-01T00:00:00+00:00,0.05\n"
    )
    given = (*LONG, "--spot", "--prices", "spot.csv", "--deadline", "9d", "--max-nodes", "1")
    seldom = data(*given)
    assert seldom["best"]["machines"][0]["usd_h"] == 0.05
    assert any("0.1 evictions" in note for note in seldom["notes"])
    often = data(*given, "--evictions", "0.5")["best"]
    assert often["time_s"]["median"] > seldom["best"]["time_s"]["median"]
    assert often["checkpoint_s"] < seldom["best"]["checkpoint_s"]


def test_mixed_fleets_may_be_taken(folder):
    Path("prices.csv").write_text(PRICES.replace("gcp", "aws"))
    given = (*LONG, "--deadline", "3d", "--max-nodes", "2")
    assert data(*given, "--mixed")["num_considered"] > data(*given)["num_considered"]


def test_probes_are_proposed_in_order(folder):
    gpus = ("--accelerator", "L4", "--accelerator", "T4")
    asked = (*LONG, *gpus, "--deadline", "20d", "--steps", "1000000")
    found = data(*asked, "--probe", "2")
    assert [(p["instance_type"], p["finds"]) for p in found["probes"]] == [("l4.one", ["compute"])]
    assert found["probes"][0]["gain"] > found["probes"][0]["usd"]
    assert found["probes_ended"] == "no probe is worth its price"
    said = rent(*asked, "--probe", "2").stdout
    assert "1. compute on 1 x l4.one (1 L4) in gcp east: $0.05, 4 min; in " in said
    assert "then no probe is worth its price" in said
    for little in (("--probe", "0.01"), ("--probe", "2", "--probe-time", "1m")):
        none = data(*asked, *little)
        assert none["probes"] == []
        assert "the cap leaves" in none["probes_ended"]
    assert data(*asked)["probes"] == []


def test_a_busy_machine_is_said(folder, monkeypatch):
    monkeypatch.undo()
    profile = Path(folder / "t4.json")
    profile.write_text(json.dumps(replace(PROFILE, noise=0.4).to_json()))
    monkeypatch.chdir(folder)
    notes = data(*LONG, "--deadline", "2d")["notes"]
    assert any("which made steps 40 % longer" in n for n in notes)
    profile.write_text(json.dumps(PROFILE.to_json()))
    assert not any("busy" in n for n in data(*LONG, "--deadline", "2d")["notes"])


def test_a_busy_machine_is_said_once(folder, monkeypatch, caplog):
    """The notes say it, so the warning of ``profile_step`` is left out."""
    text = "the machine was busy, which made steps 40 % longer"
    monkeypatch.setattr(StepProfile, "is_noisy", property(lambda _: True))
    monkeypatch.setattr(StepProfile, "disturbance", property(lambda _: text))
    asked = ("--catalogue", "prices.csv", "--epochs", "2", "--batch", "16", "--deadline", "2d")
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        said = rent(*asked, "--accelerator", "").stdout
    assert said.count("the machine was busy") == 1
    assert "busy" not in caplog.text


def test_a_close_call_is_shown_beside_the_choice(folder):
    gpus = ("--accelerator", "T4", "--max-nodes", "2")
    # One T4 takes 16.7 h, and a tenth more at the 90 % end.
    asked = (*LONG, *gpus, "--deadline", "18h40m")
    (call,) = data(*asked)["close_calls"]
    assert (call["factor"], call["fleet"]["machines"][0]["num"]) == (1.05, 2)
    said = rent(*asked).stdout
    assert "→ 1 x t4.one (1 T4)" in said
    assert "≈ 2 x t4.one (1 T4 each)" in said
    assert "≈ is about as good a choice as →" in said
    assert "- a close call: with steps 5 % longer than profiled, it is 2 x t4.one" in said
    assert data(*LONG, *gpus, "--deadline", "2d")["close_calls"] == []
    assert "≈" not in rent(*LONG, *gpus, "--deadline", "2d").stdout


def test_a_device_may_have_its_own_profile(folder):
    other = replace(PROFILE, device="NVIDIA L4", forward_s=(0.05, 0.1), backward_s=(0.1, 0.2))
    Path("l4.json").write_text(json.dumps(other.to_json()))
    asked = (*LONG, "--deadline", "2d", "--accelerator", "L4", "--max-nodes", "1")
    guessed, known = data(*asked), data(*asked, "--other-profile", "l4.json")
    width = [
        each["best"]["step_s"]["high"] / each["best"]["step_s"]["median"]
        for each in (guessed, known)
    ]
    assert width[1] < 1.2 < width[0]
    assert known["best"]["step_s"]["median"] == pytest.approx(0.301)
    assert any("the speed of L4 is that of data sheets" in note for note in guessed["notes"])
    assert not any("the speed of L4" in note for note in known["notes"])


def test_a_speed_that_was_profiled_is_not_called_a_guess(folder):
    notes = data(*LONG, "--deadline", "2d", "--accelerator", "T4")["notes"]
    assert not any("the speed of" in note for note in notes)


def test_the_model_is_timed_here(folder):
    found = data("--catalogue", "prices.csv", "--deadline", "9d", "--accelerator", "")
    (stored,) = Path("profiles").iterdir()
    profile = StepProfile.from_json(json.loads(stored.read_text()))
    assert profile.batches == (1, 2, 4, 8)
    notes = " ".join(found["notes"])
    assert f"up to 8 samples was timed on {profile.device} with lr = 0.1, width = 4" in notes
    # 32 samples, 8 in a step, 4 epochs: 16 steps.
    best = found["best"]
    work_s = best["time_s"]["median"] - 180
    assert work_s == pytest.approx(16 * best["step_s"]["median"], rel=1e-6)
    assert best["machines"][0]["device_batch"] == 8
    again = data("--catalogue", "prices.csv", "--deadline", "9d", "--accelerator", "")
    assert again == found


def test_hyper_parameters_can_be_given(folder):
    given = ("--catalogue", "prices.csv", "--deadline", "9d", "--accelerator", "")
    notes = data(*given, "--hp", "width=6", "--hp", "lr=0.5")["notes"]
    assert any("lr = 0.5, width = 6" in note for note in notes)


def work_s(*args, file="rented.py"):
    best = data(*KNOWN, "--deadline", "99d", "--max-nodes", "1", *args, file=file)["best"]
    return (best["time_s"]["median"] - 180) / best["step_s"]["median"]


def test_epochs_are_counted_in_steps(folder):
    assert work_s() == pytest.approx(4 * 4)
    assert work_s("--epochs", "10") == pytest.approx(10 * 4)
    assert work_s("--epochs", "10", "--batch", "5") == pytest.approx(10 * 7)
    assert work_s("--steps", "33") == pytest.approx(33)


def test_a_whole_study(folder):
    # For each of 5 widths 2 epochs once, then 2 more twice, on one machine: 30 epochs of 4 steps.
    assert work_s("--study") == pytest.approx(30 * 4)
    with pytest.raises(UsageError, match="defines no study"):
        rent(*LONG, "--study", file="bare.py")


def test_a_task_without_a_study(folder):
    assert work_s("--epochs", "3", file="bare.py") == pytest.approx(3 * 2)
    Path("made.py").write_text(TASK + "\nbig = Mine(rows=4)\n")
    assert work_s("--epochs", "3", file="made.py") == pytest.approx(3 * 8)
    with pytest.raises(UsageError, match="--epochs or --steps"):
        rent(*KNOWN, "--deadline", "2d", file="bare.py")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "does not define a study"),
        (TASK + "\none, two = Mine(), Mine()\n", r"several tasks \(one, two\)"),
        (TASK.replace(" = 16", ""), "cannot be made without arguments"),
        (
            STUDY
            + (
                "\nother = th.Study(study.task, study.space, algorithm=study.algorithm, "
                "metric='mse', name='b')"
            ),
            "several studies",
        ),
        (TASK.replace("self.batch_size = rows", "self.batch_size = 'rows'"), "--hp rows=32"),
    ],
)
def test_files_that_make_no_sense(folder, source, message):
    Path("wrong.py").write_text(source)
    with pytest.raises(UsageError, match=message):
        rent(*KNOWN, "--epochs", "1", file="wrong.py")


def test_one_of_several_tasks(folder):
    Path("two.py").write_text(TASK + "\none, two = Mine(4), Mine(8)\n")
    assert work_s("--epochs", "1", "--name", "one", file="two.py") == pytest.approx(8)
    assert work_s("--epochs", "1", "--name", "two", file="two.py") == pytest.approx(4)
    assert work_s("--epochs", "1", "--name", "Mine", file="two.py") == pytest.approx(2)
    with pytest.raises(UsageError, match="does not define study 'three'"):
        rent(*KNOWN, "--epochs", "1", "--name", "three", file="two.py")


LOOP = """
import thrifty as th

class Own(th.Trainable):
    def setup(self, hp, *, seed, device): ...
    def train(self, epoch, hp): ...
    def evaluate(self): return {"mse": 0.0}
    def state(self): return {}
    def load_state(self, state): ...

study = th.Study(Own(), th.Space(lr=0.1), algorithm=th.GridSearch(max_epochs=1),
                 metric="mse", mode="min", name="own")
"""


def test_a_loop_of_its_own_cannot_be_timed(folder):
    Path("own.py").write_text(LOOP)
    with pytest.raises(UsageError, match="Own owns its training loop"):
        rent("--catalogue", "prices.csv", "--deadline", "2d", file="own.py")
    assert best(*LONG, "--deadline", "2d", file="own.py")["num"] == 1


def test_a_task_of_several_workers_is_timed_as_one(folder):
    Path("crew.py").write_text(
        STUDY.replace("LineTask(),", "th.hetero.HeteroTask(LineTask(), workers=2),")
    )
    assert work_s(file="crew.py") == pytest.approx(4 * 4)


SETS = """
import torch, thrifty as th
from thrifty.testing import LineTask

class Sets(LineTask):
    def data(self, hp):
        arrays = super().data(hp)
        sets = [torch.utils.data.TensorDataset(*each) for each in (arrays.train, arrays.valid)]
        return tuple(sets)

task = Sets()
"""


def test_data_sets_are_read_as_in_training(folder):
    Path("sets.py").write_text(SETS)
    given = ("--catalogue", "prices.csv", "--epochs", "2", "--hp", "lr=0.1", "--batch", "50")
    data(*given, "--accelerator", "", "--deadline", "2d", file="sets.py")
    (stored,) = Path("profiles").iterdir()
    profile = StepProfile.from_json(json.loads(stored.read_text()))
    # An eighth, a fourth and a half of 50; then all 32 samples of the data.
    assert profile.batches == (7, 13, 25, 32)
    assert profile.sample_input_s > 0


@pytest.fixture
def scripts(folder, monkeypatch):
    """Scripts that train, and a wheel that was built before."""
    wheel = folder / "thrifty-0-py3-none-any.whl"
    wheel.write_bytes(b"")
    monkeypatch.setattr("thrifty.cli._rent._output._wheel", lambda source, to: wheel)
    Path("rented.py").write_text(f"{STUDY}\nif __name__ == '__main__':\n    study.run()\n")
    Path("run.py").write_text("print('trains')\n")
    return folder


def test_the_picture_and_the_task(scripts):
    folder = scripts
    given = (*LONG, "--deadline", "2d", "--plot", "front.png", "--export", "sky.yaml")
    said = rent(*given).stdout
    assert "wrote front.png" in said
    assert Path("front.png").read_bytes()[1:4] == b"PNG"
    task = Path("sky.yaml").read_text()
    for line in ("name: rented", "instance_type: l4.one", f"workdir: {folder}"):
        assert line in task
    assert "rented.py" in task
    assert "run.py --fast" in (
        rent(*given, "--script", "run.py --fast") and Path("sky.yaml").read_text()
    )
    data(*given)


def test_the_machines_install_the_thrifty_that_runs_here(scripts):
    rent(*LONG, "--deadline", "2d", "--export", "sky.yaml")
    task = Path("sky.yaml").read_text()
    name = "thrifty-0-py3-none-any.whl"
    assert f"setup: pip install ~/{name}" in task
    assert f"~/{name}: {scripts / name}" in task


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ((), "rented.py only defines things, so the machines would train nothing"),
        (("--script", "gone.py --fast"), "there is no file gone.py in "),
        (("--script", " "), "--script is blank"),
        (("--script", "odd.py"), "odd.py cannot be read"),
    ],
)
def test_a_script_that_trains_nothing_is_not_exported(folder, script, message):
    Path("odd.py").write_text("if:")
    with pytest.raises(UsageError, match=re.escape(message)):
        rent(*LONG, "--deadline", "2d", "--export", "sky.yaml", *script)
    assert not Path("sky.yaml").exists()


def test_the_plan_is_printed_before_an_export_is_refused(folder):
    given = ["rented.py", *LONG, "--deadline", "2d", "--export", "sky.yaml"]
    found = CliRunner().invoke(rent_command, given)
    assert isinstance(found.exception, UsageError)
    assert "l4.one" in found.stdout
    # with --json, an error is the only document
    found = CliRunner().invoke(rent_command, [*given, "--json"])
    assert isinstance(found.exception, UsageError)
    assert not found.stdout


IMPORTS = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ('"""Words."""\nimport torch\n', False),
        (IMPORTS + "def train():\n    print(1)\n", False),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None\n", False),
        ("import thrifty as th\nrows = load()\nstudy = th.Study(rows)\n", False),
        ("LR: float\nEPOCHS: int = 3\n", False),
        (IMPORTS + "if __name__ == '__main__':\n    main()\n", True),
        ("def train():\n    return 1\nbest = train()\n", True),
        ("study = make()\nbest: float = study.run().best\n", True),
        ("for epoch in range(3):\n    print(epoch)\n", True),
        ("try:\n    train()\nfinally:\n    pass\n", True),
    ],
)
def test_scripts_that_only_define_things_are_told_apart(tmp_path, text, does):
    script = tmp_path / "train.py"
    script.write_text(text)
    if does:
        assert script_of(script, None) == "train.py"
    else:
        with pytest.raises(UsageError, match="only defines things"):
            script_of(script, None)


def installed(monkeypatch, url, **more):
    source = None if url is None else json.dumps({"url": url, **more})
    found = SimpleNamespace(version="1.2", read_text=lambda name: source)
    monkeypatch.setattr("thrifty.cli._rent._output.distribution", lambda name: found)


def test_a_version_from_an_index_comes_from_there(tmp_path, monkeypatch):
    installed(monkeypatch, None)
    assert installation(tmp_path) == Installation(setup="pip install thrifty==1.2")


def test_a_version_from_another_address_comes_from_there(tmp_path, monkeypatch):
    installed(monkeypatch, "https://host/t.git", vcs_info={"vcs": "git", "commit_id": "ab1"})
    assert installation(tmp_path).setup == "pip install git+https://host/t.git@ab1"
    installed(monkeypatch, "https://host/t 1.whl")
    assert installation(tmp_path) == Installation(setup="pip install 'https://host/t 1.whl'")


def test_the_wheel_that_was_installed_is_copied(tmp_path, monkeypatch):
    wheel = tmp_path / "thrifty-1.2-py3-none-any.whl"
    installed(monkeypatch, wheel.as_uri())
    with pytest.raises(CloudError, match="which is gone; install it again"):
        installation(tmp_path)
    wheel.write_bytes(b"")
    remote = f"~/{wheel.name}"
    assert installation(tmp_path) == Installation(
        setup=f"pip install {remote}", mounts={remote: str(wheel)}
    )


def test_thrifty_has_to_be_installed_to_be_copied(tmp_path, monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("thrifty.cli._rent._output.distribution", nothing)
    with pytest.raises(CloudError, match="pip install -e CHECKOUT"):
        installation(tmp_path)


def test_a_checkout_that_gives_no_wheel(tmp_path, monkeypatch):
    installed(monkeypatch, (tmp_path / "no").as_uri())
    with pytest.raises(CloudError, match=r"no wheel of .*no can be built for the rented"):
        installation(tmp_path / "wheels")


def test_nothing_is_rented_without_a_yes(scripts, monkeypatch):
    launched = []
    monkeypatch.setattr(
        "thrifty.cli._rent._command.launch", lambda task: launched.append(task) or "id-1"
    )
    given = (*LONG, "--deadline", "2d", "--launch")
    no = rent(*given, answer="n\n")
    assert (no.exit_code, launched) == (1, [])
    assert "rent 1 x l4.one (1 L4) for about $7.37" in no.stdout
    assert "id-1" in rent(*given, answer="y\n").stdout
    assert "l4.one" in launched[0]


def test_whose_prices_they_are(folder):
    bare = ("--profile", "t4.json", "--steps", "1000", "--batch", "16")
    assert any("comes with thrifty" in note for note in data(*bare)["notes"])
    catalogue = Path(".sky/catalogs/v8/aws/vms.csv")
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text(PRICES)
    notes = data(*bare)["notes"]
    assert any("SkyPilot's catalogue" in note for note in notes)
    fresh = PRICES.replace("2024-06-01", str(date.today())).replace(
        "2024-05-01", str(date.today() - timedelta(days=60))
    )
    Path("prices.csv").write_text(fresh)
    assert any("1 of 3 offers are older" in note for note in data(*LONG)["notes"])
    Path("prices.csv").write_text(re.sub(r",[\d-]+$", ",", fresh, flags=re.MULTILINE))
    assert any("prices.csv, without a date" in note for note in data(*LONG)["notes"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--deadline", "1h", "--budget", "5"), "not both"),
        (("--export", "a.yaml"), "--export needs a choice"),
        (("--launch",), "--launch needs a choice"),
        (("--probe", "2"), "--probe needs a choice"),
        (("--epochs", "2"), "exclude each other"),
        (("--plot", "no/front.png"), "there is no folder"),
        (("--deadline", "1h", "--export", "no/a.yaml"), "there is no folder"),
        (("--plot", "front.doc"), "its extension must be one of"),
        (("--deadline", "1m"), "over the deadline"),
        (("--device", "Z9"), "--device Z9: use one of"),
    ],
)
def test_errors_say_what_to_do(folder, args, message):
    with pytest.raises(UsageError, match=message):
        rent(*LONG, *args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--deadline", "soon"), "write 90m, 6h, 2d or 1h30m"),
        (("--budget", "much"), "write 50 or 2.5"),
        (("--quota", "L4"), "write NAME=NUMBER"),
        (("--quota", "L4=few"), "no whole number"),
        (("--hp", "lr"), "write NAME=VALUE"),
    ],
)
def test_options_are_checked(folder, args, message):
    result = rent(*LONG, *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_profile_is_one(folder):
    Path("t4.json").write_text("{}")
    with pytest.raises(UsageError, match="no step profile"):
        rent(*LONG)
    Path("t4.json").write_text("tea")
    with pytest.raises(UsageError, match=r"t4\.json holds no profile"):
        rent(*LONG)


def test_where_profiles_are_kept(folder, monkeypatch):
    monkeypatch.delenv("THRIFTY_CACHE")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    given = ("--catalogue", "prices.csv", "--accelerator", "", "--hp", "width=7")
    with pytest.raises(MissingExtraError, match="cloud"):
        rent(*given)
    fake = SimpleNamespace(user_cache_path=lambda name: folder / "home" / name)
    monkeypatch.setitem(sys.modules, "platformdirs", fake)
    rent(*given)
    assert list((folder / "home/thrifty").iterdir())


def test_torch_is_not_needed_for_a_stored_profile(folder):
    program = (
        "import sys; from click.testing import CliRunner; "
        "from thrifty.cli._rent._command import rent_command; "
        f"result = CliRunner().invoke(rent_command, {['rented.py', *LONG, '--deadline', '2d']!r}); "
        "assert result.exit_code == 0, result; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("device", "named", "profiled", "vcpus"),
    [
        ("Tesla V100-SXM2-16GB", None, "V100", 1.0),
        ("Tesla V100-SXM2-32GB", None, "V100-32GB", 1.0),
        ("NVIDIA A100-SXM4-80GB", None, "A100-80GB", 1.0),
        ("NVIDIA A10G", None, "A10G", 1.0),
        ("NVIDIA H200", None, "H200", 1.0),
        ("Some processor, 8 thread(s)", None, "", 8.0),
        ("Strange card", "L4", "L4", 1.0),
        ("T4", "", "", 1.0),
    ],
)
def test_the_profiled_device_is_known_by_its_name(device, named, profiled, vcpus):
    estimates = hardware_of(device, named=named)
    assert (estimates.profiled, estimates.profiled_vcpus) == (profiled, vcpus)


def test_an_unknown_device_is_asked_for():
    with pytest.raises(CloudError, match="pass the most similar one with --device"):
        hardware_of("Strange card", named=None)


def test_how_options_are_read():
    duration, dollars = Duration(), Dollars()
    for text, seconds in [
        ("90m", 5400),
        ("6h", 21600),
        ("2d", 172800),
        ("1h30m", 5400),
        ("1.5 h", 5400),
        ("10s", 10),
    ]:
        assert duration.convert(text, None, None) == seconds
    assert duration.convert(3.0, None, None) == 3.0
    assert [dollars.convert(text, None, None) for text in ("50", "$2.5", 3.0)] == [50, 2.5, 3]
    value = Pair(whole=False)
    assert value.convert("lr=0.1", None, None) == ("lr", 0.1)
    assert value.convert("kind=adam", None, None) == ("kind", "adam")
    assert value.convert("a=b=c", None, None) == ("a", "b=c")
    assert Pair(whole=True).convert("p3.2xlarge=4", None, None) == ("p3.2xlarge", 4)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7200.0, "2.0 h (1.0 to 4.0)"),
        (7199.0, "120 min (60.0 to 240)"),
        (119.0, "119 s (59.5 to 238)"),
    ],
)
def test_times_have_a_unit(seconds, text):
    assert span(Interval(median=seconds, low=seconds / 2, high=2 * seconds)) == text


def test_batches_that_are_left_out_are_not_counted(folder):
    text = TASK + (
        "\nclass Dropping(Mine):\n"
        "    def data(self, hp):\n"
        "        data = super().data(hp)\n"
        "        rows = torch.utils.data.TensorDataset(*data.train)\n"
        "        return th.DatasetPair(train=rows, valid=rows, drop_last=True)\n"
        "\ndropping = Dropping()\n"
    )
    Path("dropping.py").write_text("import torch\nimport thrifty as th\n" + text)
    whole = work_s("--epochs", "3", "--batch", "5", "--name", "dropping", file="dropping.py")
    assert whole == pytest.approx(3 * 6)


def test_a_batch_that_is_larger_than_the_data_is_an_error():
    rows = torch.utils.data.TensorDataset(torch.zeros(4, 1))
    source = open_source(
        DatasetPair(train=rows, valid=rows, drop_last=True), device=torch.device("cpu")
    )
    make = batches_of(source)
    assert [len(make(3)[0]) for _ in range(3)] == [3, 3, 3]
    with pytest.raises(TaskError, match="drop_last=True leaves no batch"):
        make(5)
