"""Artifacts are downloads: only what the database records for a trial, and never as a page."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

import thrifty as th
from thrifty.store import CheckpointFolder, Store
from thrifty.store._plan_files import ArtifactFiles

from .conftest import SCRIPT, opened


pytestmark = pytest.mark.slow

TOKEN = "a" * 32
PAGE = f"<html>{SCRIPT}</html>"


@th.trainable
def train(trial):
    width = trial.suggest_int("width", 1, 2)
    file = Path("page.html").resolve()
    for _epoch in trial.epochs({}):
        file.write_text(f"{PAGE}{width}")
        trial.log_artifact(file)
        yield {"loss": 1.0 / width}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Return a folder with a database of two studies, each with files of its own."""
    folder = tmp_path_factory.mktemp("logged")
    with contextlib.chdir(folder):
        for seed in (0, 1):
            th.Study(
                train,
                algorithm=th.GridSearch(max_epochs=1),
                metric="loss",
                mode="min",
                storage=f"sqlite:///{folder}/t.db",
                name=f"s{seed}",
                seed=seed,
            ).run(progress=False, executor=th.Local(threads=1))
    (folder / "secret").write_text("secret")
    return folder


@pytest.fixture
def database(logged, tmp_path):
    """Return a copy of the database, beside copies of the files."""
    shutil.copytree(logged, tmp_path, dirs_exist_ok=True)
    return tmp_path / "t.db"


@pytest.fixture
def client(database):
    with opened(database) as made:
        yield made


def address(client, *, study=1, trial=0, digest=None):
    path = f"/api/studies/{study}/trials/{trial}"
    if digest is None:
        (found,) = client.get(path).json()["artifacts"]
        digest = found["digest"]
    return f"{path}/artifacts/{digest}"


def test_a_download_is_the_file_and_no_page(client):
    response = client.get(address(client))
    assert response.status_code == 200
    assert response.text == f"{PAGE}1"
    headers = response.headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''page.html"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "sandbox"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"
    assert int(headers["content-length"]) == len(response.content)


def test_they_need_the_token_if_there_is_one(database):
    with opened(database, token=TOKEN) as guarded:
        path = address(guarded, digest="0" * 32)
        assert guarded.get(path).status_code == 401
        for cookie in ("thrifty_80=wrong", f"other={TOKEN}"):
            assert guarded.get(path, headers={"cookie": cookie}).status_code == 401
        assert guarded.get(f"{path}?token={TOKEN}").status_code == 401
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert guarded.get(path, headers=bearer).status_code == 404


def test_other_hosts_are_refused(client):
    assert client.get(address(client), headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    "digest",
    ["0" * 32, "0" * 31, "A" * 32, "../../../secret", "..%2f..%2f..%2fsecret", "%2e%2e/secret",
     "..%5c..%5csecret", "%2fetc%2fpasswd", "0" * 32 + "%00", "0" * 32 + "%0a", "file:%2f%2fsecret",
     "1-1.safetensors", "%F0%9F%92%A9", "*", ""],
)  # fmt: skip
def test_what_is_not_recorded_is_not_served(client, digest):
    response = client.get(address(client, digest=digest))
    assert response.status_code in (404, 422)
    assert "secret" not in response.text or digest in response.text


def test_the_digest_of_another_trial_or_study_is_not_served(client):
    other = client.get("/api/studies/1/trials/1").json()["artifacts"][0]["digest"]
    assert client.get(address(client, trial=1, digest=other)).status_code == 200
    assert client.get(address(client, trial=0, digest=other)).status_code == 404
    assert client.get(address(client, study=9, digest=other)).status_code == 404
    assert client.get(address(client, trial=9, digest=other)).status_code == 404


@pytest.mark.parametrize("digest", ["../../secret", "../../../secret", "0" * 32])
def test_a_hostile_database_leads_nowhere(client, database, digest):
    stored = [{"name": SCRIPT, "digest": digest, "num_bytes": 6, "error": ""}]
    with create_engine(f"sqlite:///{database}").begin() as connection:
        connection.execute(text("UPDATE epochs SET artifacts = :a"), {"a": json.dumps(stored)})
    assert client.get(address(client, digest=digest)).status_code in (404, 422)
    (found,) = client.get("/api/studies/1/trials/0").json()["artifacts"]
    assert found["name"] == SCRIPT


def test_a_name_cannot_break_the_header(client, database):
    path = address(client)
    digest, name = path.rpartition("/")[2], 'a"; filename=b\r\nSet-Cookie: x=y'
    stored = [{"name": name, "digest": digest, "num_bytes": len(PAGE) + 1, "error": ""}]
    with create_engine(f"sqlite:///{database}").begin() as connection:
        connection.execute(text("UPDATE epochs SET artifacts = :a"), {"a": json.dumps(stored)})
    headers = client.get(path).headers
    assert "set-cookie" not in headers
    assert headers["content-disposition"].endswith(
        "''a%22%3B%20filename%3Db%0D%0ASet-Cookie%3A%20x%3Dy"
    )


def test_a_damaged_file_and_a_link_are_not_served(client, tmp_path):
    path = address(client)
    files = [*tmp_path.glob(f"t-checkpoints/*/artifact-{path.rpartition('/')[2]}")]
    for file in files:
        file.write_text("x" * (len(PAGE) + 1))
    response = client.get(path)
    assert (response.status_code, "is damaged" in response.text) == (404, True)
    for file in files:
        file.unlink()
        file.symlink_to(tmp_path / "secret")
    assert client.get(path).status_code == 404


def test_nothing_can_be_written(client):
    path = address(client)
    for method in ("post", "put", "patch", "delete"):
        assert getattr(client, method)(path).status_code == 405


def test_another_folder_is_named(database, tmp_path):
    (tmp_path / "t-checkpoints").rename(tmp_path / "moved")
    with opened(database) as lost:
        assert lost.get(address(lost)).status_code == 404
    with opened(database, checkpoints=str(tmp_path / "moved")) as found:
        assert found.get(address(found)).text == f"{PAGE}1"


def test_a_file_that_was_not_stored_is_said(client, database):
    with Store.open(f"sqlite:///{database}") as store:
        files = ArtifactFiles(CheckpointFolder("/proc/thrifty"), folder="plan")
        lost = files.put(database, name="t.db")
        assert not lost.is_stored
        assert store.studies.artifacts(1)
    stored = json.dumps([lost.to_json()])
    with create_engine(f"sqlite:///{database}").begin() as connection:
        connection.execute(text("UPDATE epochs SET artifacts = :a"), {"a": stored})
    (found,) = client.get("/api/studies/1/trials/0").json()["artifacts"]
    assert found["error"]
    assert client.get(address(client)).status_code == 404
