"""`mcore-dsa plan`: a layer's tensors and its selection on each tensor-parallel rank, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

import torch

from mcore_dsa.attention_work import attention_work, best_shard
from mcore_dsa.backends import Target, choose
from mcore_dsa.backends.choice import triton_refusal
from mcore_dsa.cli.outcome import WIDTH, Outcome, table
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import shown
from mcore_dsa.settings import AttendShard, Kernels, Partition, bytes_text, default_bytes
from mcore_dsa.tp_plan import DsaTpPlan
from mcore_dsa.work import CONTEXT_PARTITIONS, best_partition, selection_work

type Report = dict[str, Any]

# What a partition is compared with: every rank selects for every row.
_OFF: Partition = "off"
# Pool ids are int32, so that a pack has fewer pools than this.
_POOLS = 2**31
# An element of the latents in BF16.
_LATENT_BYTES = 2


def plan(
    config: str,
    tp: int,
    cp: int,
    seq: int,
    segments: str | None,
    partition: Partition | None,
    kernels: Kernels,
    device_bytes: int,
    plot: str | None,
) -> Outcome:
    """The plan of one layer; see the command's help for the arguments.

    Raises: OSError or ValueError for a file that cannot be read or written, or an option or content that does not fit.
    """
    geometry = DsaGeometry.from_config(config)
    lengths = _lengths(seq, segments)
    if seq // geometry.index_kpool >= _POOLS:
        raise ValueError(f"--seq is {seq}; accepted are fewer than {_POOLS} pools of {geometry.index_kpool} tokens")
    assumed = _assumed(geometry, kernels, device_bytes)
    selection = _selection(geometry, lengths, tp, cp, partition, assumed)
    report: Report = {
        "config": config,
        "tp": tp,
        "cp": cp,
        "seq": seq,
        "documents": len(lengths),
        "assumed": assumed,
        **_weights(geometry, tp),
        "selection": selection,
        "attention": _attention(geometry, lengths, tp, cp, selection["partition"], assumed),
        "latents": _latents(geometry, seq, cp),
    }
    if plot is not None:
        _draw(selection, report["attention"], plot)
        report["plot"] = plot
    return Outcome(report, lambda: _text(report))


def _lengths(seq: int, segments: str | None) -> list[int]:
    if segments is None:
        return [seq]
    words = Path(segments).read_text(encoding="utf-8", errors="replace").split()
    bad = [word for word in words if not (word.isdecimal() and len(word) < 20 and int(word) > 0)]
    if bad or not words:
        found = f"has {shown(bad[0])}" if bad else "is empty"
        raise ValueError(f"--segments {segments} {found}; accepted are integers >= 1")
    lengths = [int(word) for word in words]
    if sum(lengths) != seq:
        raise ValueError(f"--segments {segments} adds up to {sum(lengths)}; accepted is --seq {seq}")
    return lengths


def _weights(geometry: DsaGeometry, tp: int) -> Report:
    plans = [DsaTpPlan(rank, tp, geometry) for rank in range(tp)]
    first = plans[0]
    tensors = [
        {
            "name": tensor.name,
            "shard": tensor.kind.value,
            "elem_bytes": tensor.elem_bytes,
            "full_shape": tensor.full_shape,
            "full_bytes": tensor.full_bytes,
            "local_shape": tensor.local_shape,
            "local_bytes": tensor.local_bytes,
            "src_row_offsets": [plan.tensors[position].src_row_offset for plan in plans],
            "src_col_offsets": [plan.tensors[position].src_col_offset for plan in plans],
        }
        for position, tensor in enumerate(first.tensors)
    ]
    layer = {
        "local": first.local_bytes,
        "full": first.full_bytes,
        "replicated": first.replicated_bytes,
        "ape_in_fp32": first.ape_widening_bytes,
    }
    counts = {"layer": 1, "dsa_layers": len(geometry.dsa_layers), "mtp_blocks": geometry.num_nextn_predict_layers}
    sizes = {name: {"layers": n, **{key: n * size for key, size in layer.items()}} for name, n in counts.items()}
    return {"tensors": tensors, "bytes": sizes, "needs_output_all_reduce": first.needs_output_all_reduce}


def _assumed(geometry: DsaGeometry, kernels: Kernels, device_bytes: int) -> Report:
    """What runs on devices that the kernels are for, and what it may take there unless the settings say otherwise."""
    choice = choose(kernels, target := _target(geometry))
    if choice.fault:
        raise ValueError(f"--kernels is triton and {triton_refusal(target)}")
    budget = default_bytes(device_bytes)
    return {
        "kernels": choice.backend.name,
        "device_bytes": device_bytes,
        "score_bytes": budget,
        "attend_bytes": budget,
    }


def _target(geometry: DsaGeometry) -> Target:
    return Target(
        "cuda",
        (9, 0),
        "3.7.0",
        (torch.bfloat16,),
        heads=geometry.index_n_heads,
        dim=geometry.index_head_dim,
        channels=geometry.kv_lora_rank,
        pool_size=geometry.index_kpool,
    )


def _selection(
    geometry: DsaGeometry, lengths: Sequence[int], tp: int, cp: int, partition: Partition | None, assumed: Report
) -> Report:
    kinds = get_args(Partition) if cp == 1 else CONTEXT_PARTITIONS
    if partition is not None and partition not in kinds:
        accepted = " and ".join(kinds)
        raise ValueError(f"--partition is {partition}; accepted are, with --cp {cp}, {accepted}")
    uneven = [length for length in lengths if cp > 1 and length % (2 * cp)]
    if uneven:
        raise ValueError(f"a document is {uneven[0]} tokens; accepted is, with --cp {cp}, a multiple of {2 * cp}")
    best = best_partition(lengths, geometry, group_size=tp, context_size=cp)
    options: Report = {"group_size": tp, "context_size": cp, **_of(assumed, "score_bytes")}
    ranks = {
        kind: [asdict(rank) for rank in selection_work(lengths, geometry, partition=kind, **options).ranks]
        for kind in kinds
    }
    unsharded = max(rank["flops"] for rank in ranks[_OFF])
    return {
        "best": best,
        "partition": partition or best,
        "partitions": {kind: _of_partition(of_ranks, unsharded) for kind, of_ranks in ranks.items()},
    }


def _of(assumed: Report, budget: str) -> Report:
    return {"kernels": assumed["kernels"], budget: assumed[budget]}


def _attention(
    geometry: DsaGeometry, lengths: Sequence[int], tp: int, cp: int, partition: Partition, assumed: Report
) -> Report:
    options: Report = {"group_size": tp, "partition": partition, "context_size": cp, **_of(assumed, "attend_bytes")}
    shards = {shard: attention_work(lengths, geometry, shard=shard, **options) for shard in get_args(AttendShard)}
    return {
        "best": best_shard(shards),
        "partition": partition,
        "shards": {
            shard: {
                "memory_seconds": max(rank.memory_seconds for rank in ranks),
                "transfer_seconds": max(rank.transfer_seconds for rank in ranks),
                "ranks": list(map(asdict, ranks)),
            }
            for shard, ranks in shards.items()
        },
    }


def _latents(geometry: DsaGeometry, seq: int, cp: int) -> Report:
    """What attention takes of a layer's latents: backward keeps a context-parallel rank's own, and gathers anew."""
    held = seq * geometry.kv_lora_rank * _LATENT_BYTES
    own = held // cp
    return {"received_bytes": held - own, "held_bytes": held, "saved_bytes": own}


def _of_partition(ranks: Sequence[Report], unsharded: int) -> Report:
    """`unsharded` are the FLOPs of the busiest rank with the flag off."""
    flops = [rank["flops"] for rank in ranks]
    return {
        "busiest_over_mean": max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0,
        "busiest_flops": max(flops),
        "saved_flops": unsharded - max(flops),
        "saved_share": 1 - max(flops) / unsharded if unsharded else 0.0,
        "ranks": list(ranks),
    }


def _text(report: Report) -> str:
    documents = f"{report['documents']:,} document{'s' if report['documents'] != 1 else ''}"
    title = f"{report['config']}: TP {report['tp']}, CP {report['cp']}, {report['seq']:,} tokens in {documents}"
    return "\n\n".join(
        [
            fill(title, WIDTH, break_long_words=False),
            _assumed_text(report["assumed"]),
            *_weights_text(report),
            *_selection_text(report["selection"]),
            _attention_text(report["attention"]),
            _latents_text(report["latents"]),
        ]
    )


def _assumed_text(assumed: Report) -> str:
    device, scores, attention = (bytes_text(assumed[f"{name}_bytes"]) for name in ("device", "score", "attend"))
    return (
        f"Assumed: {assumed['kernels']} kernels in BF16 on CUDA devices of {device}, where {scores} of scores\n"
        f"in flight and {attention} of attention in flight are the default"
    )


def _weights_text(report: Report) -> list[str]:
    tensors = [
        (
            tensor["name"],
            tensor["shard"],
            list(tensor["full_shape"]),
            list(tensor["local_shape"]),
            tensor["local_bytes"],
            tensor["full_bytes"],
        )
        for tensor in report["tensors"]
    ]
    labels = {"layer": "a layer", "dsa_layers": "all DSA layers", "mtp_blocks": "multi-token-prediction blocks"}
    sizes = [(labels[name], *size.values()) for name, size in report["bytes"].items()]
    return [
        "A DSA layer in BF16: rank r holds the r-th part of the rows or columns of a sharded tensor\n"
        + table(("self_attn.", "shard", "whole", "part", "bytes of part", "of whole"), tensors, text_columns=2),
        "Bytes on a rank, and beyond them those of ape in fp32, as the model keeps it\n"
        + table(("", "layers", "on a rank", "whole", "replicated", "ape in fp32"), sizes, text_columns=1),
    ]


def _selection_text(selection: Report) -> list[str]:
    partitions = [
        (
            name + (" (best)" if name == selection["best"] else ""),
            _figure(entry["busiest_flops"]),
            f"{entry['busiest_over_mean']:.3f}",
            f"{_figure(entry['saved_flops'])} ({entry['saved_share']:.1%})",
            *(max(rank[key] for rank in entry["ranks"]) for key in ("received_bytes", "peak_bytes")),
        )
        for name, entry in selection["partitions"].items()
    ]
    ranks = [
        (rank, of["rows"], of["scored_pairs"], _figure(of["flops"]), of["received_bytes"], of["peak_bytes"])
        for rank, of in enumerate(selection["partitions"][selection["partition"]]["ranks"])
    ]
    titles = ("partition", "FLOPs", "over mean", "FLOPs saved", "bytes received", "peak bytes")
    return [
        "Selection in one forward of a layer: the greatest of all ranks, and what its busiest rank saves against off\n"
        + table(titles, partitions, text_columns=1),
        f"The same on each rank, {selection['partition']}\n"
        + table(("rank", "rows", "scored pairs", *titles[1:2], *titles[4:]), ranks, text_columns=0),
    ]


def _attention_text(attention: Report) -> str:
    flops, sizes = (
        ("forward_flops", "backward_flops"),
        ("forward_memory", "backward_memory", "forward_received", "backward_received", "saved"),
    )
    rows = []
    for shard, entry in attention["shards"].items():
        most = {key: max(rank[key] for rank in entry["ranks"]) for key in entry["ranks"][0]}
        rows.append(
            (
                f"by {shard}" + (" (best)" if shard == attention["best"] else ""),
                *(_figure(most[key]) for key in flops),
                *(_figure(most[f"{key}_bytes"]) for key in sizes),
                f"{1e3 * entry['transfer_seconds']:.1f}",
            )
        )
    titles = (
        "cut",
        "FLOPs forward",
        "backward",
        "memory forward",
        "backward",
        "received forward",
        "backward",
        "saved",
        "ms",
    )
    return (
        f"Attention of a layer, {attention['partition']}: the greatest of all ranks; ms for what both passes move in\n"
        "memory and receive, at an H200's 4.8 TB/s of memory and 450 GB/s of NVLink, an estimate\n"
        + table(titles, rows, text_columns=1)
    )


def _latents_text(latents: Report) -> str:
    sizes = (latents["received_bytes"], latents["held_bytes"], latents["saved_bytes"])
    titles = ("bytes received in each", "held in each", "saved in between")
    return "Latents of a layer in BF16, gathered over context parallelism in forward and in backward\n" + table(
        titles, [sizes], text_columns=0
    )


def _figure(flops: int) -> str:
    return f"{flops:.3e}"


def _draw(selection: Report, attention: Report, path: str) -> None:
    """Left the selection's work of each rank under each partition; with the flag off every rank has all of it, far
    above the others. Right what both cuts of the attention take of the busiest rank.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13.0, 5.0), layout="constrained")
    axes, cuts = figure.subplots(1, 2, width_ratios=(2, 1))
    partitions = {name: entry for name, entry in selection["partitions"].items() if name != _OFF}
    width = 0.8 / len(partitions)
    for position, (name, entry) in enumerate(partitions.items()):
        flops = [rank["flops"] for rank in entry["ranks"]]
        left = [rank - 0.4 + position * width for rank in range(len(flops))]
        label = f"{name}: busiest rank {entry['busiest_over_mean']:.2f} times the mean"
        axes.bar(left, flops, width, align="edge", label=label)
    axes.set(xlabel="tensor-parallel rank", ylabel="FLOPs of scored pairs, one layer's forward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    for shard, entry in attention["shards"].items():
        read = 1e3 * entry["memory_seconds"]
        total = 1e3 * entry["transfer_seconds"]
        cuts.bar(f"by {shard}", read, color="tab:blue", label="memory" if shard == "heads" else None)
        cuts.bar(
            f"by {shard}",
            max(0.0, total - read),
            bottom=read,
            color="tab:orange",
            label="exchange" if shard == "heads" else None,
        )
    cuts.set(ylabel="ms, one layer's attention, both passes, at an H200's rates")
    cuts.set_title(f"attention, {attention['partition']}")
    cuts.legend()
    figure.savefig(path)
