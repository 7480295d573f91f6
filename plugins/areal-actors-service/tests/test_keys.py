"""``areal-actors keys``: on a file, and on a running service."""

from __future__ import annotations

import re
from functools import partial

import anyio
import httpx
import pytest
from click.testing import CliRunner

from areal_actors.cli import cli
from areal_actors_service.account_keeper import AccountKeeper
from areal_actors_testing.serving import open_scripted_proxy


def invoke(*arguments: str, **environment: str):
    return CliRunner().invoke(cli, ["keys", *arguments], env=environment)


def test_keys_command_creates_lists_and_revokes_in_a_file(tmp_path):
    """Created, listed without its secret, revoked by its id; the secret is all of standard output."""
    store = ("--store", str(tmp_path / "keys.sqlite"))
    created = invoke(
        "create", "林さん", "--experiment", "sums", "--max-sessions", "3", "--expires", "2999-01-31", *store
    )
    secret = created.stdout.strip()
    listed = invoke("list", *store)
    key_id = created.stderr.split()[0]
    revoked = invoke("revoke", key_id, *store)

    assert (0, 0, 0) == (created.exit_code, listed.exit_code, revoked.exit_code), created.output + revoked.output
    assert secret.startswith("sk-user-")
    row = listed.stdout.splitlines()[1].split()
    assert [key_id, "林さん", "sums", "-", "3"] == row[:5]
    assert "valid until 2999-01-31 00:00" in listed.stdout
    assert secret not in listed.output
    assert "revoked" in invoke("list", *store).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("revoke", "key_nobody"), "There is no key key_nobody; 'areal-actors keys list'"),
        (("create", "a\nb"), "control characters"),
        (("create", "ada", "--expires", "tomorrow"), "expires_at must be a time"),
        (("create", "ada", "--expires", "1999-01-01"), "expired already"),
        (("create", "ada", "--experiment", "../ada"), "experiment must be letters, digits, dots, dashes"),
        (("create", "ada", "--experiment", "sums", "--trial", "first/second"), "trial must be letters, digits"),
        (("list", "--url", "http://127.0.0.1:9"), "AREAL_ADMIN_KEY"),
        (("list", "--url", "http://127.0.0.1:9", "--admin-key", "sk-admin-x"), "does not answer"),
    ],
)
def test_keys_command_reports_mistakes_in_one_line(tmp_path, arguments, words):
    """What happened, to what, and no traceback."""
    done = invoke(*arguments, "--store", str(tmp_path / "keys.sqlite"), AREAL_ADMIN_KEY="")

    assert done.exit_code in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_keys_command_names_another_kind_of_file(tmp_path):
    """It is a mistake of the command, and the file stays as it is."""
    path = tmp_path / "keys.sqlite"
    path.write_text("a diary\n" * 200)
    done = invoke("create", "ada", "--store", str(path))

    assert done.exit_code == 2
    assert "is not a file of keys" in done.stderr
    assert path.read_text().startswith("a diary")


@pytest.mark.anyio
async def test_keys_command_uses_a_running_service(tmp_path):
    """With its admin key from the environment; what was created works at once."""
    keeper = AccountKeeper(tmp_path / "keys.sqlite")
    async with open_scripted_proxy(accounts=keeper) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        place = {"AREAL_ADMIN_KEY": proxy.endpoint.admin_key}

        async def run(*arguments: str):
            return await anyio.to_thread.run_sync(partial(invoke, *arguments, "--url", f"{proxy.url}/v1", **place))

        created = await run("create", "ada", "--tokens-per-day", "9")
        headers = {"authorization": f"Bearer {created.stdout.strip()}"}
        before = await http.post("/rl/start_session", headers=headers)
        revoked = await run("revoke", re.search(r"key_\w+ of", created.stderr)[0].split()[0])
        listed = await run("list")
        after = await http.post("/rl/start_session", headers=headers)
        wrong = await run("revoke", "../health")

    assert (200, 401) == (before.status_code, after.status_code), created.output
    assert (0, 0) == (revoked.exit_code, listed.exit_code)
    assert "ada" in listed.stdout
    assert (1, True) == (wrong.exit_code, "There is no" in wrong.stderr)
