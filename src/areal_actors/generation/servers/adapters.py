"""Adapters that servers load next to their base model, named by the version that they belong to.

A request names the adapter that samples it, so its tokens have one version. A new version is loaded on every server
first; then requests begin under it, and those that run are ended and continue under it. Servers are not paused, and
their base weights are never replaced: other runs may use the same servers with other adapters. An old adapter is
unloaded before the next one is loaded, unless a request still uses it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import httpx
from attrs import define, field, frozen

from areal_actors.errors import EngineError, ModelError
from areal_actors.generation.servers.config import AdapterSlots
from areal_actors.generation.servers.dialect import ServerDialect, ServerFacts
from areal_actors.generation.servers.http import ask, describe_failure, get_document

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@frozen(kw_only=True)
class PublishedAdapter:
    """An adapter in the directory ``path``, by the name under which servers load it."""

    name: str
    path: Path


@define(eq=False)
class Adapters:
    """The adapters of the engines of one process on their servers. ``run`` is in the name of each."""

    dialect: ServerDialect
    slots: AdapterSlots
    options: Sequence[str]
    """The options of a server that has room for them."""
    base: Path
    run: str
    used: Counter[str] = field(factory=Counter, init=False)
    """The number of attempts under each adapter, by name."""
    _num_admitted: int = field(default=0, init=False)
    _admitted: dict[tuple[int, Path], PublishedAdapter] = field(factory=dict, init=False)

    def admit(self, version: int, path: Path) -> PublishedAdapter:
        """Name the adapter of ``version`` in ``path``. Raises ``ModelError`` unless it is one.

        The engines of all servers admit it, and get the same name; so do those that return to an earlier one.
        """
        if (known := self._admitted.get((version, path))) is not None:
            return known
        for name in _FILES:
            if not (path / name).is_file():
                raise ModelError(f"{path} is not a directory of an adapter: it has no {name}. The old one stays.")
        self._num_admitted += 1
        name = f"areal-{self.run}-{version}-{self._num_admitted}"
        return self._admitted.setdefault((version, path), PublishedAdapter(name=name, path=path))

    async def prepare(self, client: httpx.AsyncClient, facts: ServerFacts, adapter: PublishedAdapter | None) -> None:
        """Check that a server can serve adapters on our base model, and load ``adapter`` unless it has it.

        Raises ``EngineError`` if it cannot.
        """
        if facts.max_adapter_rank < self.slots.rank:
            limit = (
                f"takes adapters of rank {facts.max_adapter_rank} at most, and trainer.lora.rank is {self.slots.rank}"
            )
            raise EngineError(
                f"{client.base_url} {limit if facts.max_adapter_rank else 'was started without LoRA'}. Start it with "
                f"{' '.join(self.options)}. Or publish merged weights, which any server can load: "
                "trainer.lora.serving=merged."
            )
        _require_base(client, facts, self.base)
        if adapter is not None and adapter.name not in await self._list(client):
            await self.load(client, adapter)

    async def load(self, client: httpx.AsyncClient, adapter: PublishedAdapter) -> None:
        """Load an adapter. Raises ``ModelError`` if the server rejects it.

        SGLang remembers the path of each name and may read it again, so neither is used for a second version.
        """
        body = {"lora_name": adapter.name, "lora_path": str(adapter.path)}
        await _post(client, f"{self.dialect.adapter_root}/load_lora_adapter", body)

    async def unload_unused(self, client: httpx.AsyncClient, used: Collection[str]) -> None:
        """Unload the adapters of this engine that are not ``used``."""
        for name in await self._list(client):
            if name.startswith(f"areal-{self.run}-") and name not in used:
                await _post(client, f"{self.dialect.adapter_root}/unload_lora_adapter", {"lora_name": name})

    async def _list(self, client: httpx.AsyncClient) -> frozenset[str]:
        """Return the names of models and adapters that the server lists."""
        document = await get_document(client, "/v1/models", software=self.dialect.name)
        try:
            return frozenset(str(model["id"]) for model in document["data"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"{client.base_url} does not list its models: {error!r}") from error


def _require_base(client: httpx.AsyncClient, facts: ServerFacts, base: Path) -> None:
    """Raise ``EngineError`` unless the server has the base weights in ``base``, as far as can be seen from here."""
    if facts.weight_version.isdecimal():
        raise EngineError(
            f"{client.base_url} has the weights that a run published as version {facts.weight_version}, and adapters "
            f"need those of {base}; start the server again."
        )
    served = Path(facts.model)
    is_same = served.name == base.name
    if served.is_dir():
        is_same = served.resolve() == base.resolve() or _sizes(served) == _sizes(base)
    if not is_same:
        raise EngineError(
            f"{client.base_url} serves {facts.model}, and the adapter is one of {base}: it means nothing on other "
            "weights. Start the server with the base model."
        )


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}


async def _post(client: httpx.AsyncClient, path: str, body: Mapping[str, str]) -> None:
    """Send a command about an adapter. Raises ``ModelError`` for a rejection, ``EngineError`` for other failures."""
    answer = await ask(client, "POST", path, body)
    document = answer.document if isinstance(answer.document, Mapping) else {}
    # vLLM answers 500 for an adapter that it cannot load, and 404 for one that it does not find.
    is_rejected = answer.is_error and "error" in document and "EngineDead" not in answer.said
    if is_rejected or answer.is_refusal or document.get("success") is False:
        said = document.get("error_message") or answer.said
        raise ModelError(
            f"{client.base_url} refuses {json.dumps(body)}: {said} If it cannot load such adapters, set "
            "trainer.lora.serving to merged."
        )
    if answer.is_error:
        raise EngineError(describe_failure(client, path, answer))
