"""PolicySet: a checked policy file, ready to be asked which policy and backend a request gets. Immutable."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Self

from ..prompt import ConfigError, UnknownModel, UnknownPolicy
from .inherit import merged
from .keyring import Keyring, may_use_model, require_model, require_policy
from .load import PolicyFileError, parse_policy_text, read_policy_text
from .match import (
    POLICY_HEADER,
    Chosen,
    Facts,
    Resolution,
    chosen_by_client,
    digest,
    drawn_into,
    matches,
    serving,
    split_suffix,
)
from .presets import PRESETS
from .schema import (
    ApiKeySpec,
    Backend,
    CollectionsSpec,
    EmbeddedBackend,
    KVCacheSpec,
    ModelsSpec,
    OpenAIBackend,
    Policy,
    RouteSpec,
    ServerSpec,
)
from .yamltree import Path, Problem, Tree

BUILT_IN = "<policy>"
"""Stands for the file's name in errors about text that is in no file."""
_SHARED_PASSWORD: Path = ("kv_cache", "shared", "password_env")
_NO_ROUTE = None, RouteSpec(on_failure="open")
_COUNTERS_PASSWORD: Path = ("server", "counters", "password_env")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """Everything that a policy file says. `policies` has the presets too, each policy with all that it inherits.

    `file` is None for the built-in default. Loading reads no environment variable, so that a file can be checked where
    its secrets are not; a server calls `require_environment` before it starts.
    """

    file: str | None
    default_policy: str
    server: ServerSpec
    backends: Mapping[str, Backend]
    policies: Mapping[str, Policy]
    routes: tuple[RouteSpec, ...]
    kv_cache: KVCacheSpec
    collections: CollectionsSpec
    models: ModelsSpec
    keys: Keyring = field(repr=False, compare=False)
    _tree: Tree = field(repr=False, compare=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None) -> Self:
        """Read a policy file; None gives the default. ConfigError names every problem as `file:line: message`."""
        return cls.default() if path is None else cls.from_text(read_policy_text(path), file=str(path))

    @classmethod
    def default(cls) -> Self:
        """One embedded backend named `local` with the default chat model, and the presets."""
        return cls.from_text("version: 1\n")

    @classmethod
    def from_text(cls, text: str, *, file: str | None = None) -> Self:
        """The same from YAML text; `file` stands in error messages and is the anchor of relative paths."""
        parsed, tree = parse_policy_text(text, file=file or BUILT_IN)
        raw = tree.data.get("policies", {})
        policies = {name: Policy.model_validate(merged(name, raw)) for name in raw}
        presets = {name: Policy.model_validate(fields) for name, fields in PRESETS.items() if name not in policies}
        return cls(
            file=file,
            default_policy=parsed.default_policy,
            server=parsed.server,
            backends=parsed.backends,
            policies={**policies, **presets},
            routes=parsed.routes,
            kv_cache=parsed.kv_cache,
            collections=parsed.collections,
            models=parsed.models,
            keys=Keyring(parsed.server.api_keys),
            _tree=tree,
        )

    def policy(self, name: str) -> Policy:
        """The policy of this name; UnknownPolicy lists the names there are."""
        found = self.policies.get(name)
        if found is None:
            raise UnknownPolicy(f"unknown policy {name[:80]!r}; known: {', '.join(self.policies)}", param="policy")
        return found

    def model_names(self) -> tuple[str, ...]:
        """The models that backends list, in the order of the file, each once."""
        return tuple(dict.fromkeys(model for backend in self.backends.values() for model in backend.models))

    def authenticate(self, api_key: str | None) -> ApiKeySpec | None:
        """The entry of this key; None when the file lists no keys and everybody is let in. Unauthorized otherwise."""
        return self.keys.authenticated(api_key)

    def resolve(
        self,
        model: str,
        *,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        prompt_tokens: int | Callable[[], int] = 0,
        conversation: Callable[[], bytes] | None = None,
    ) -> Resolution:
        """Policy and backend of a request.

        Policy: the header `x-promptsluice-policy`, else the model's suffix, else the first matching route, else the
        default. Backend: the route's, else one that lists the model, else an upstream without a list.
        `prompt_tokens` may be a function; it is called only when a route asks for the size. `conversation` gives what
        tells conversations apart (rollout.py); what has none takes part in no rollout.
        Raises UnknownPolicy, UnknownModel, and Forbidden when the client may not choose the policy that it asks for, or
        its key may not use the policy or the model.
        """
        lowered = {name.lower(): value for name, value in (headers or {}).items()}
        base, suffix = split_suffix(
            model, is_model=self.model_names().__contains__, is_policy=self.policies.__contains__
        )
        entry = self.keys.find(api_key)
        require_model(entry, base)
        facts = Facts(
            model=base,
            headers=lowered,
            key_name=entry.name if entry else None,
            key_sha256=digest(api_key) if api_key else None,
            prompt_tokens=prompt_tokens if callable(prompt_tokens) else lambda: prompt_tokens,
            conversation=conversation,
        )
        place, route = next(((i, one) for i, one in enumerate(self.routes) if matches(one.match, facts)), _NO_ROUTE)
        chosen = self._chosen(lowered.get(POLICY_HEADER, "").strip(), suffix, route, place, facts, entry)
        require_policy(entry, chosen.name)
        return Resolution(
            model=base,
            backend=route.backend or self._backend(base, entry),
            policy=self.policy(chosen.name),
            policy_name=chosen.name,
            reason=chosen.reason,
            route=place,
            key_name=facts.key_name,
            rollout=chosen.rollout,
            group=chosen.group,
            shadow=None if route.shadow == chosen.name else route.shadow,
            fail_closed=route.on_failure == "closed",
        )

    def _chosen(
        self, header: str, suffix: str, route: RouteSpec, place: int | None, facts: Facts, key: ApiKeySpec | None
    ) -> Chosen:
        """By the client, where it may; else by the route, the key or the file, in this order."""
        may = None if key is None else key.policies
        own = Chosen(name=self.default_policy, reason="default_policy")
        if place is not None and route.policy is not None:
            own = Chosen(name=route.policy, reason=f"route {place + 1}")
        elif key is not None and may is not None and own.name not in may:
            own = Chosen(name=may[0], reason=f"the first of API key {key.name!r}")
        if header or suffix:
            how = f"header {POLICY_HEADER}" if header else "model suffix"
            return chosen_by_client(header or suffix, how, own=own, policies=self.policies, also=may or ())
        if route.rollout is None or (may is not None and route.rollout.policy not in may):
            return own
        return drawn_into(route.rollout, facts, own=own)

    def _backend(self, model: str, key: ApiKeySpec | None) -> str:
        found = serving(model, self.backends)
        if found is None:
            known = ", ".join(name for name in self.model_names() if may_use_model(key, name))
            raise UnknownModel(f"the model {model[:80]!r} does not exist; known: {known}", param="model")
        return found

    def key_digests(self) -> tuple[str, ...]:
        """The SHA-256 digests, in hex, of the API keys that are listed and known."""
        return self.keys.digests()

    def upstream_key(self, backend: str) -> str | None:
        """The key for an upstream from its environment variable, None where it needs none. ConfigError when unset, or
        when no header can carry it.
        """
        spec = self.backends[backend]
        if not isinstance(spec, OpenAIBackend):
            return None
        path = ("backends", backend, "api_key_env")
        key = self._secret(spec.api_key_env, path)
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
            message = (
                f"environment variable {spec.api_key_env} holds no API key: a line break, a space or no ASCII in it"
            )
            raise ConfigError(message, file=self.file, line=self._tree.line(path))
        return key

    def shared_cache_password(self) -> str | None:
        """The password of the shared chunk store, None where it needs none. ConfigError when unset."""
        shared = self.kv_cache.shared
        return None if shared is None else self._secret(shared.password_env, _SHARED_PASSWORD)

    def counters_password(self) -> str | None:
        """The password of the server that counts limits, None where it needs none. ConfigError when unset."""
        counters = self.server.counters
        return None if counters is None else self._secret(counters.password_env, _COUNTERS_PASSWORD)

    def _secret(self, variable: str | None, path: Path) -> str | None:
        if variable is None:
            return None
        secret = os.environ.get(variable)
        if not secret:
            raise ConfigError(f"environment variable {variable} is not set", file=self.file, line=self._tree.line(path))
        return secret

    def unset_environment(self) -> tuple[Problem, ...]:
        """The environment variables that the file names and that are unset or empty, with their lines."""
        named: list[tuple[Path, str | None]] = [
            (("backends", name, "api_key_env"), spec.api_key_env)
            for name, spec in self.backends.items()
            if isinstance(spec, OpenAIBackend)
        ]
        if self.kv_cache.shared is not None:
            named.append((_SHARED_PASSWORD, self.kv_cache.shared.password_env))
        if self.server.counters is not None:
            named.append((_COUNTERS_PASSWORD, self.server.counters.password_env))
        named += [(("server", "api_keys", i, "env"), key.env) for i, key in enumerate(self.server.api_keys)]
        return tuple(
            Problem(self._tree.line(path), f"environment variable {variable} is not set")
            for path, variable in named
            if variable is not None and not os.environ.get(variable)
        )

    def require_environment(self) -> None:
        """Raise ConfigError naming every environment variable that the file needs and that is not set."""
        problems = self.unset_environment()
        if problems:
            raise PolicyFileError(self.file or BUILT_IN, list(problems))

    @property
    def collections_root(self) -> FilePath:
        """Where collections lie; under the user's data directory unless the file says otherwise."""
        return self._path(self.collections.root, "collections")

    @property
    def summaries_path(self) -> FilePath | None:
        """The file of summaries; None where they are kept in memory alone."""
        path = self.server.summaries.path
        return None if path is None else self._path(path, "summaries.sqlite")

    @property
    def kv_cache_path(self) -> FilePath:
        """Where the disk tier of the chunk store lies."""
        return self._path(self.kv_cache.path, "kv")

    def prefix_cache_path(self, backend: EmbeddedBackend) -> FilePath | None:
        """Where the disk tier of an engine's prefix cache lies; None where it has none."""
        disk = backend.prefix_cache.disk
        return None if disk is None or not disk.size else self._path(disk.path, "prefix")

    @property
    def models_cache(self) -> FilePath | None:
        """Where models are cached; None for the hub's default."""
        return None if self.models.cache is None else self._path(self.models.cache, "models")

    def _path(self, given: str | None, default: str) -> FilePath:
        """`~` is expanded; a relative path starts at the policy file's directory, not at the process's."""
        if given is None:
            data_home = os.environ.get("XDG_DATA_HOME") or FilePath.home() / ".local" / "share"
            return FilePath(data_home) / "promptsluice" / default
        here = FilePath(self.file).resolve().parent if self.file else FilePath.cwd()
        return here / FilePath(given).expanduser()
