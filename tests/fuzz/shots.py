"""Requests that are wrong in every way that a seeded generator thinks of.

A shot is made from the seed of a route by a few mutations: of the JSON tree, of its text, of protobuf, of the bytes, the encoding, the
headers, the query and the ids in the path. The same seed of the generator makes the same shots.
"""

import copy
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode

import zstandard

from tests.fuzz.odds import ODD, ODD_ENCODINGS, ODD_HEADERS, ODD_IDS, ODD_QUERIES, ODD_TYPES
from tests.fuzz.seeds import ENDING, PARAMETERS, SEEDS, Seed
from tests.fuzz.wire import Shot
from tinsmith.protocol import tinker_pb2 as pb

_JSON = "application/json"


@dataclass
class Gun:
    """Makes shots, round the routes, from the ids of a furnished server."""

    ids: Mapping[str, str]
    rng: random.Random
    seqs: Iterator[int] = field(default_factory=lambda: itertools.count(5))

    def shots(self, num: int) -> Iterator[Shot]:
        routes = sorted(SEEDS)
        for index in range(num):
            route = routes[index % len(routes)]
            yield self._shot(route, self.rng.choice(SEEDS[route]))

    def rights(self) -> Iterator[Shot]:
        """Each seed as it is, what ends or deletes something last."""
        for route in sorted(SEEDS, key=lambda route: (route in ENDING, route)):
            yield from (self._right(route, seed) for seed in SEEDS[route])

    def _shot(self, route: str, seed: Seed) -> Shot:
        """Of mutations one kind or, now and then, several."""
        kinds = [self._of_body] if isinstance(seed.body, pb.ForwardBackwardRequest) or seed.body is not None else []
        others: list[Callable[[Shot], Shot]] = [self._of_path, self._of_query, self._of_headers]
        chosen = [*kinds * 3, *others]
        shot = self._right(route, seed)
        for mutate in self.rng.sample(chosen, self.rng.choice((1, 1, 1, 2))):
            shot = self._tree(shot, seed) if mutate == self._of_body else mutate(shot)
        return shot

    def _right(self, route: str, seed: Seed) -> Shot:
        """The seed itself."""
        path = route.split()[1]
        for name in re.findall(r"{(\w+)(?::path)?}", path):
            value = self._filled(seed.names.get(name, PARAMETERS[name]))
            path = re.sub(rf"{{{name}(:path)?}}", lambda _, value=value: quote(value, safe="/:"), path)  # type: ignore[misc]
        query = urlencode({name: self._filled(value) for name, value in seed.query.items()})
        headers = {"accept": _JSON, **seed.headers}
        body: bytes | None = None
        if isinstance(seed.body, pb.ForwardBackwardRequest):
            headers["content-type"], body = "application/x-protobuf", self._message(seed.body).SerializeToString()
        elif seed.body is not None:
            headers["content-type"], body = _JSON, json.dumps(self._named(seed.body)).encode()
        return Shot(route, f"{path}?{query}" if query else path, body, headers, ())

    def _message(self, seed: pb.ForwardBackwardRequest) -> pb.ForwardBackwardRequest:
        message = pb.ForwardBackwardRequest()
        message.CopyFrom(seed)
        message.model_id, message.seq_id = self.ids["<run>"], next(self.seqs)
        return message

    def _filled(self, text: str) -> str:
        return self.ids.get(text, text)

    def _named(self, tree: Any) -> Any:
        """The tree with ids in place of their marks."""
        if isinstance(tree, dict):
            return {name: self._named(part) for name, part in tree.items()}
        if isinstance(tree, list):
            return [self._named(part) for part in tree]
        if tree == "<seq>":
            return next(self.seqs)
        return self._filled(tree) if isinstance(tree, str) else tree

    # Mutations: each answers another shot.

    def _of_body(self, shot: Shot) -> Shot:
        raise AssertionError("bodies are mutated with their seed, in _tree")

    def _tree(self, shot: Shot, seed: Seed) -> Shot:
        if isinstance(seed.body, pb.ForwardBackwardRequest):
            return self._of_bytes(replace(shot, body=self._odd_message(seed.body)))
        if self.rng.random() < 0.25:
            return self._of_bytes(shot)
        tree, how = self._named(seed.body), []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            tree, did = self._odd_tree(tree)
            how.append(did)
        text = json.dumps(tree)
        if self.rng.random() < 0.15:
            text = self._odd_text(text)
            how.append("text")
        return replace(shot, body=text.encode(), how=(*shot.how, *how))

    def _odd_tree(self, tree: Any) -> tuple[Any, str]:
        """One place of the tree changed."""
        places = list(_places(tree))
        if not places:
            return self._odd(), "body"
        place = self.rng.choice(places)
        holder, key = _at(tree, place[:-1]), place[-1]
        act = self.rng.choice(("odd", "odd", "odd", "odd", "drop", "rename", "move", "wrap", "deep", "repeat", "extra"))
        match act:
            case "odd":
                holder[key] = self._odd()
            case "drop":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[self.rng.choice((f"{key}x", key.upper(), "", "__class__", "model_config"))] = holder.pop(key)
            case "move":
                holder[key] = json.loads(json.dumps(_at(tree, self.rng.choice(places))))
            case "wrap":
                holder[key] = [holder[key]] if self.rng.random() < 0.5 else {"value": holder[key]}
            case "deep":
                for _ in range(self.rng.choice((5, 31, 40, 300))):
                    holder[key] = [holder[key]]
            case "repeat" if isinstance(holder, list):
                holder.extend(holder[key : key + 1] * self.rng.choice((1, 5, 500)))
            case _:
                if isinstance(holder, dict):
                    holder[self.rng.choice(("extra", "type", "model_id", "seq_id", "session_id", "tenant"))] = self._odd()
        return tree, f"{act} {'.'.join(map(str, place))}"

    def _odd(self) -> object:
        """Its own copy: the next mutation may change what stands in it."""
        return copy.deepcopy(self.rng.choice(ODD))

    def _odd_text(self, text: str) -> str:
        """JSON that no tree makes: names twice, marks that are none, text before and after."""
        key = self.rng.choice(re.findall(r'"(\w+)":', text) or ["a"])
        return self.rng.choice(
            (
                text.replace("{", f'{{"{key}": {json.dumps(self.rng.choice(ODD))}, ', 1),
                text.replace(f'"{key}":', f'"{key}": 1, "{key}":', 1),
                "\ufeff" + text,
                text + "x",
                text * 2,
                text.replace('"', "'"),
                text.replace(":", ": 0", 1),
                text.replace(",", ",,", 1),
                text[: self.rng.randrange(len(text) + 1)],
                "",
                "null",
                '"' + "\\u0000" * 50 + '"',
                "-",
                "1e999999",
                "[" * 100_000,
            )
        )

    def _odd_message(self, seed: pb.ForwardBackwardRequest) -> bytes:
        """Protobuf with fields twice, of other kinds, out of bounds."""
        message = self._message(seed)
        datum = message.data[0]
        target = datum.loss_fn_inputs["target_tokens"]
        rng = self.rng
        acts: Sequence[Callable[[], object]] = (
            lambda: target.shape.append(rng.choice((-1, 0, 2**62))),
            lambda: target.sparse_csr.MergeFrom(pb.SparseCsr(crow_indices=rng.randbytes(rng.choice((7, 8, 24))))),
            lambda: target.sparse_csr.MergeFrom(pb.SparseCsr(col_indices=rng.randbytes(16))),
            lambda: setattr(target, "dtype", rng.choice((0, 1, 7, -1))),
            lambda: setattr(target, "dense", rng.randbytes(rng.choice((0, 3, 16)))),
            lambda: setattr(datum.loss_fn_inputs["weights"], "dense", b"\0\0\xc0\x7f" * 2),
            lambda: setattr(datum.model_input[0].encoded_text, "tokens", rng.randbytes(rng.choice((0, 3, 8, 400)))),
            lambda: datum.model_input[0].image.CopyFrom(pb.ImageChunk(data=b"\x89PNG" * 9, format="png", expected_tokens=2**31 - 1)),
            lambda: datum.model_input[0].dmel.CopyFrom(pb.DmelChunk(dmel=b"x")),
            lambda: datum.model_input.extend([pb.Chunk()] * 3),
            lambda: message.data.extend([pb.Datum()] * rng.choice((1, 100))),
            lambda: setattr(message, "loss_fn", rng.choice(("", "ppo", "dro", "nope", "\x00", "x" * 5000))),
            lambda: message.loss_fn_config.update({"": float("nan"), "beta": float("inf")}),
            lambda: setattr(message, "model_id", rng.choice(("", "é", "a/b", "x" * 5000))),
            lambda: setattr(message, "seq_id", rng.choice((-1, 0, 2**31 - 1))),
            lambda: setattr(datum.model_input_spans[0].prompt_tokens, "length", rng.choice((-1, 2**62))),
        )
        for act in rng.sample(acts, rng.choice((0, 1, 2))):
            act()
        return message.SerializeToString()

    def _of_bytes(self, shot: Shot) -> Shot:
        """Cut, turned bits, doubled parts, zstd that is none, of whatever the body is."""
        body, rng = shot.body or b"", self.rng
        at = rng.randrange(len(body) + 1)
        headers = dict(shot.headers)
        act = rng.choice(("cut", "bits", "double", "insert", "zstd", "zstd cut", "zstd bits", "not zstd", "encoding", "none", "whole"))
        match act:
            case "cut":
                body = body[:at]
            case "bits":
                body = _turned(body, rng)
            case "double":
                body = body[:at] + body
            case "insert":
                body = body[:at] + rng.choice((rng.randbytes(9), b"\xff" * 11, b"\x1a\xff\xff\xff\xff\x0f", b"\x00")) + body[at:]
            case "zstd" | "zstd cut" | "zstd bits":
                body, headers["content-encoding"] = zstandard.compress(body), "zstd"
                body = body[: rng.randrange(len(body))] if act == "zstd cut" else _turned(body, rng) if act == "zstd bits" else body
            case "not zstd":
                headers["content-encoding"] = "zstd"
            case "encoding":
                headers["content-encoding"] = rng.choice(ODD_ENCODINGS)
            case "none":
                body = b""
        return replace(shot, body=body, headers=headers, how=(*shot.how, act))

    def _of_path(self, shot: Shot) -> Shot:
        path, mark, query = shot.target.partition("?")
        parts = path.split("/")
        first = 3 if path.startswith("/api") else 2
        at = self.rng.randrange(first, len(parts))
        odd = self.rng.choice(ODD_IDS)
        parts[at] = odd if "%" in odd and odd.isascii() and " " not in odd else quote(odd, safe="/:;?#+")
        if self.rng.random() < 0.2:
            parts.append(parts[at])
        return replace(shot, target="/".join(parts) + mark + query, how=(*shot.how, f"path {at} {odd[:20]!r}"))

    def _of_query(self, shot: Shot) -> Shot:
        path, _, query = shot.target.partition("?")
        pairs = [pair.split("=") for pair in query.split("&") if "=" in pair]
        if pairs and self.rng.random() < 0.8:
            pair = self.rng.choice(pairs)
            odd = self.rng.choice([odd for odd in ODD if isinstance(odd, str | int | float)])
            pair[1] = quote(str(odd)[:4000].encode(errors="replace"))
            query = "&".join("=".join(pair) for pair in pairs)
            if self.rng.random() < 0.2:
                query += "&" + query
        else:
            query = self.rng.choice(ODD_QUERIES)
        return replace(shot, target=f"{path}?{query}", how=(*shot.how, f"query {query[:60]}"))

    def _of_headers(self, shot: Shot) -> Shot:
        headers = dict(shot.headers)
        if "content-type" in headers and self.rng.random() < 0.3:
            headers["content-type"] = self.rng.choice(ODD_TYPES)
            return replace(shot, headers=headers, how=(*shot.how, f"content-type {headers['content-type'][:40]!r}"))
        name, value = self.rng.choice(ODD_HEADERS)
        headers[name] = value
        return replace(shot, headers=headers, how=(*shot.how, f"{name} {value[:40]!r}"))


def _places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a tree, at most a few of a list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:4]) if isinstance(tree, list) else ()
    for key, part in items:
        yield (*at, key)
        yield from _places(part, (*at, key)) if len(at) < 12 else ()


def _at(tree: Any, place: Sequence[Any]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def _turned(body: bytes, rng: random.Random) -> bytes:
    turned = bytearray(body)
    for _ in range(rng.choice((1, 2, 8)) if body else 0):
        turned[rng.randrange(len(turned))] ^= 1 << rng.randrange(8)
    return bytes(turned)
