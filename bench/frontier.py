"""Time against memory on the transformer under every built-in policy, beside torch's selective checkpointing.

8 blocks of width 256 with 4 heads, on 4 x 256 tokens. Torch's selective checkpointing is given the same policies; in
its eager mode it computes again what a policy offloads. It works with `.backward()` only, and so does the comparison.
"""

from __future__ import annotations

import functools

import torch
from _common import WAYS, Benchmark, Row, selective
from _transformer import Transformer, backward
from matplotlib.figure import Figure

from remat import policies, remat
from remat.policies import Policy

MIB = 2**20


def built_in(nbytes: int) -> dict[str, Policy]:
    """Every built-in policy. `nbytes` is the size of one activation of the block's width."""
    names = {"names_which_can_be_saved": ["attention"], "names_which_can_be_offloaded": ["qkv"]}
    places = {"offload_src": "device", "offload_dst": "pinned_host"}
    return {
        "nothing_saveable": policies.nothing_saveable,
        "everything_saveable": policies.everything_saveable,
        "dots_saveable": policies.dots_saveable,
        "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
        "offload_dot_with_no_batch_dims": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "save_only_these_names: attention": policies.save_only_these_names("attention"),
        "save_only_these_names: qkv, attention": policies.save_only_these_names("qkv", "attention"),
        "save_any_names_but_these: qkv": policies.save_any_names_but_these("qkv"),
        "save_anything_except_these_names: qkv": policies.save_anything_except_these_names("qkv"),
        "save_and_offload_only_these_names": policies.save_and_offload_only_these_names(**names, **places),
        "save_ops: bmm": policies.save_ops("bmm"),
        "recompute_ops: gelu, softmax": policies.recompute_ops("gelu", "_softmax"),
        "offload_ops: addmm": policies.offload_ops("addmm"),
        "save_every: 2, addmm": policies.save_every(2, "addmm"),
        "save_at_most: one activation": policies.save_at_most(nbytes),
        "save_at_least: above one": policies.save_at_least(nbytes + 1),
        "save_if: every dot, no bmm": policies.save_if(lambda ctx, op, *args, **kwargs: "addmm" in str(op)),
    }


def above(ours: list[Row], theirs: list[Row]) -> float:
    """How far ours is above theirs: the greatest ratio of times, each at the memory of one of theirs.

    Ours is the fastest of those with at most 1% more memory than theirs.
    """
    worst = 0.0
    for other in theirs:
        if any(o.peak <= other.peak and o.median < other.median for o in theirs):
            continue  # not on their frontier
        within = [row.over(other) for row in ours if row.peak <= 1.01 * other.peak]
        worst = max(worst, min(within, default=float("nan")))
    return worst


def picture(sections: dict[str, dict[str, Row]]) -> Figure:
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots()
    for (section, rows), style in zip(sections.items(), ("ks", "C0o", "C1D"), strict=True):
        done = {name: row for name, row in rows.items() if not row.error}
        x, y = [row.peak / MIB for row in done.values()], [1e3 * row.median for row in done.values()]
        axes.plot(x, y, style, label=section, alpha=0.8)
        is_peers = section.startswith("peers")
        best, least = [], float("inf")  # the frontier: the only points with names, for others lie close together
        for peak, time, name in sorted(zip(x, y, done, strict=True)):
            if time < least or is_peers:
                best.append((peak, least := time))
                if is_peers or section.startswith("remat"):
                    at = (4, 4) if is_peers else (4, -10)
                    axes.annotate(name, (peak, time), textcoords="offset points", xytext=at, fontsize=8)
        if not is_peers:
            axes.plot(*zip(*best, strict=True), style[:2] + "--", linewidth=1, alpha=0.6)
    axes.set(xlabel="peak of live MiB", ylabel="milliseconds of one step", title="the transformer under each policy")
    axes.legend()
    return figure


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    depth, width, heads, batch, tokens = (2, 16, 2, 2, 16) if bench.fast else (8, 256, 4, 4, 256)
    x = torch.randn(batch, tokens, width)
    model = Transformer(depth, width, heads)
    step = functools.partial(backward, model, x)

    found = built_in(x.nbytes)
    if bench.fast:
        found = {name: found[name] for name in ("dots_saveable", "save_only_these_names: attention")}
    rows = bench.measure(
        {
            "peers": {name: step(WAYS[name]) for name in ("no remat", "torch, non-reentrant")},
            "torch selective, .backward()": {name: step(selective(policy)) for name, policy in found.items()},
            "remat, .backward()": {name: step(remat(policy=policy)) for name, policy in found.items()},
        },
        rounds=5,
    )
    by_torch = rows["torch selective, .backward()"] | rows["peers"]
    theirs = [row for name, row in by_torch.items() if name != "no remat" and not row.error]
    ours = [row for row in rows["remat, .backward()"].values() if not row.error]
    bench.ratios["time / torch's selective, at its peaks"] = above(ours, theirs)
    bench.finish(picture(rows))


if __name__ == "__main__":
    main()
