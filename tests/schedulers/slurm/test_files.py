"""What controller and jobs leave for each other: no word is taken for another's."""

from __future__ import annotations

import json

from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles

NAME = "aa-0123456789abcdef-generation-1.1000"


def test_exit_record_belongs_to_name_and_number_of_job(tmp_path):
    """A controller that has lost its state counts anew: a record of exit is that of a name and of a number."""
    files = SlurmFiles(path=tmp_path / "slurm")
    files.create()
    others = {
        "aa-fedcba9876543210-generation-1.1000.7-0": "3 1 n1",
        f"{NAME}0.7-0": "4 1 n1",
        f"{NAME}.71-0": "5 1 n1",
        f"{NAME}.7-x": "6 1 n1",
    }
    for name, text in others.items():
        (files.path / "exit" / name).write_text(text)

    assert files.read_exit(NAME, 7) is None
    for restarts, code in enumerate((75, 0)):
        (files.path / "exit" / f"{NAME}.7-{restarts}").write_text(f"{code} 1 n1")
    found = files.read_exit(NAME, 7)
    assert found is not None
    assert (0, 1) == (found.code, found.restarts)


def test_records_are_read_without_what_cannot_be_parsed(tmp_path):
    """Fields of other versions are ignored."""
    files = SlurmFiles(path=tmp_path / "slurm")
    files.create()
    words = {"name": NAME, "worker": "generation-1", "life": 1000, "created_at": 1.0, "job": 7, "traits": {"a": "b"}}
    (files.path / "jobs" / f"{NAME}.json").write_text(json.dumps(words))
    (files.path / "jobs" / "other.json").write_text("what")
    new = JobRecord(name="aa-1", worker="x", life=1, created_at=2.0)
    files.write_record(new)

    old, written = files.read_records()
    assert (7, None) == (old.job, old.ended)
    assert new == written
