"""The quality report as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .eval_plots import arithmetic_plot, kl_plot, layer_plot, percent

_GRADES = {
    "lossless": "Every weight is exactly the source's.",
    "good": "In use it cannot be told from its source.",
    "usable": "Small differences from its source; answers stay on the whole the same.",
    "degraded": "It has clearly lost quality against its source.",
    "BROKEN": "It does not do what its source does. Do not judge the model by this pack.",
}
_STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1c1f23;--faint:#5d6570;--line:#dfe3e8;
--k0:#1f6feb;--k1:#c2571a;--k2:#1a7f37;--k3:#8250df;--k4:#9a6700;--k5:#57606a;--good:#1a7f37;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--page:#14171a;--card:#1c2024;--text:#e7eaee;--faint:#a0a8b3;--line:#343b43;
--k0:#6ea8fe;--k1:#f0955a;--k2:#5cc46f;--k3:#b794f6;--k4:#d9b13b;--k5:#9aa4ae;--good:#5cc46f;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:0 0 .5rem}
.head{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:center}
.stamp{border:2px solid currentColor;border-radius:.4rem;padding:.05rem .6rem;font-weight:700;color:var(--faint)}
.stamp.good,.stamp.lossless,.stamp.usable{color:var(--good)}.stamp.degraded,.stamp.BROKEN{color:var(--bad)}
.faint,figcaption{color:var(--faint)}figcaption{font-size:.9rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(13rem,calc(50% - .4rem)),1fr));
gap:.75rem;margin:1.25rem 0}
.facts div,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.75rem 1rem}
.facts dt{font-size:.9rem;color:var(--faint)}
.facts dd{margin:0;font-size:1.2rem;font-variant-numeric:tabular-nums}
.facts small{display:block;font-size:.85rem;color:var(--faint)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,18rem),1fr));gap:1rem}
section{margin:0 0 1rem;min-width:0}.plots section{margin:0}.plots{margin-bottom:1rem}
figure{margin:0}svg{display:block;width:100%;height:auto}
svg text{fill:var(--faint);font-size:12px;font-family:inherit}.grid{stroke:var(--line)}
.line{fill:none;stroke-width:1.5;stroke:var(--c)}.dot,.bar{fill:var(--c)}
.k0{--c:var(--k0)}.k1{--c:var(--k1)}.k2{--c:var(--k2)}.k3{--c:var(--k3)}.k4{--c:var(--k4)}.k5{--c:var(--k5)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.25rem 0 0;font-size:.9rem}
.legend i{display:inline-block;width:.75rem;height:.75rem;border-radius:.2rem;margin-right:.35rem;background:var(--c)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}th{font-weight:600;color:var(--faint)}
.answer{border-top:1px solid var(--line);padding:.6rem 0}.answer p{margin:0}
.answer:first-of-type{border:0;padding-top:0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,18rem),1fr));gap:.25rem 1rem}
.answer .pair p{margin:.25rem 0 0;white-space:pre-wrap;overflow-wrap:anywhere}
.pair b{display:block;font-size:.85rem;color:var(--faint)}
summary{cursor:pointer;font-weight:600}
"""

Row = Sequence[str]


def page(report: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """``report.html`` of a report that has a ``quality``; manifest: ``pack.json``."""
    quality, tensors = report["quality"], report["tensors"]
    name, grade = escape(manifest["name"]), escape(quality["grade"])
    body = [
        f'<div class="head"><h1>{name}</h1><span class="stamp {grade}">{grade}</span></div>',
        f"<p>{escape(_GRADES[quality['grade']])} Mean KL divergence to "
        f"{escape(quality['against']['name'])}: {number(quality['kl']['mean'])} nats a token.</p>",
        _facts(quality),
        _plots(quality, tensors),
        _section("Activations and cache", _runs(quality)),
        _section("Greedy answers", _greedy(quality["greedy"])),
        _section("Tensors", _tensors(tensors), folded=True),
        _section("How it was measured", _method(report)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name}: quality</title><style>{_STYLE}</style></head><body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def number(value: float | None) -> str:
    """A measure with three significant digits."""
    return "not measured" if value is None else f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"


def _facts(quality: Mapping[str, Any]) -> str:
    kl, text, words = quality["kl"], quality["perplexity"], quality["arithmetic"]["share"]
    known = words["source"] is not None
    facts = [
        ("Mean KL divergence", number(kl["mean"]), f"± {number(kl['error'])} nats a token"),
        ("KL at 99 % and 99.9 %", f"{number(kl['p99'])}, {number(kl['p999'])}", f"at most {number(kl['max'])}"),
        (
            "Perplexity",
            f"{number(text['source']['value'])} → {number(text['pack']['value'])}",
            f"{text['ratio']['value']:.4g} times, ± {number(text['ratio']['error'])}",
        ),
        (
            "Same most probable token",
            f"{100 * quality['same_top']['mean']:.1f} %",
            f"± {100 * quality['same_top']['error']:.1f} %",
        ),
        ("Change of probability", f"{100 * quality['rms_probability_change']:.2g} %", "RMS, of the true token"),
        (
            "Small sums right",
            f"{percent(words['source'])} → {percent(words['pack'])}" if known else "not asked",
            f"of {quality['arithmetic']['asked']}, source and pack",
        ),
        ("Bits a weight", f"{quality['bits_per_weight']:.2f}", "whole file"),
        ("Tokens scored", f"{quality['scored_tokens']:,}", quality["text"]["name"]),
    ]
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in facts
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _plots(quality: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]]) -> str:
    plots = [
        ("Where the text is affected", kl_plot(quality["kl"]["histogram"]), "Positions of the text by their KL."),
        (
            "Error by layer",
            layer_plot(tensors),
            "Output error of each linear, relative RMS, on the source's own input.",
        ),
        ("Small sums", arithmetic_plot(quality["arithmetic"]["rows"]), "Exact answers to sums, differences, products."),
    ]
    cards = (
        f"<section><h2>{escape(title)}</h2><figure>{plot}<figcaption>{escape(words)}</figcaption></figure></section>"
        for title, plot, words in plots
        if plot
    )
    return f'<div class="plots">{"".join(cards)}</div>'


def _runs(quality: Mapping[str, Any]) -> str:
    rows = [
        (
            run["label"],
            f"{number(run['kl']['mean'])} ± {number(run['kl']['error'])}",
            f"{100 * run['same_top']:.1f} %",
            f"{run['scored_tokens']:,}",
        )
        for run in quality["runs"]
    ]
    return _table(("run", "mean KL to the source", "same top token", "tokens"), rows)


def _greedy(answers: Sequence[Mapping[str, Any]]) -> str:
    blocks = []
    for answer in answers:
        first, most = answer["first_difference"], answer["tokens"]
        place = f"no difference in {most} tokens" if first is None else f"differs from token {first + 1} of {most}"
        pair = "".join(
            f"<p><b>{kind}</b>{escape(answer[kind].strip()) or '(nothing)'}</p>" for kind in ("source", "pack")
        )
        blocks.append(
            f'<div class="answer"><p>{escape(answer["prompt"])} <span class="faint">{place}</span></p>'
            f'<div class="pair">{pair}</div></div>'
        )
    return "".join(blocks) or '<p class="faint">Not asked.</p>'


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            tensor["name"],
            tensor["encoding"],
            f"{tensor['bits_per_weight']:.2f}" if "bits_per_weight" in tensor else "",
            _error(tensor, "weight_error"),
            _error(tensor, "output_error"),
            f"{100 * tensor['zeros']:.1f} %" if tensor.get("zeros") is not None else "",
        )
        for tensor in tensors
    ]
    return _table(("tensor", "encoding", "bits a weight", "weight error", "output error", "zeros"), rows)


def _error(tensor: Mapping[str, Any], field: str) -> str:
    value = tensor.get(field)
    return "" if value is None else "exact" if value == 0 else f"{100 * value:.3g} %"


def _method(report: Mapping[str, Any]) -> str:
    quality = report["quality"]
    text, against = quality["text"], quality["against"]
    calibration = quality["calibration_sha256"]
    lines = [
        f"{quality['scored_tokens']:,} tokens scored in windows of {text['window']}; the first tokens of a window "
        "are context only.",
        f"Source: {against['kind']} {against['name']}, activations {against['activations']}, cache f32. Pack: "
        f"activations {quality['activations']}, cache {quality['kv']}. On {quality['device']} ({quality['backend']}).",
        f"Text: {text['name']}, SHA-256 {text['sha256']}.",
        f"Calibration text: SHA-256 {calibration}, another one." if calibration else "No calibration text was used.",
        "Grades by mean KL: good up to 0.005, usable 0.07, degraded 0.2, BROKEN above; lossless: all exact.",
        f"Made with Tercet {report.get('tercet', '')}.",
    ]
    return "".join(f'<p class="faint" style="overflow-wrap:anywhere">{escape(line)}</p>' for line in lines)


def _table(columns: Row, rows: Sequence[Row]) -> str:
    if not rows:
        return '<p class="faint">Not measured.</p>'
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _section(title: str, content: str, folded: bool = False) -> str:
    if folded:
        return f"<section><details><summary>{escape(title)}</summary>{content}</details></section>"
    return f"<section><h2>{escape(title)}</h2>{content}</section>"
