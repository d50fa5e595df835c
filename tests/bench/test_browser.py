"""Measuring from a page: through the client and the worker, in Chromium."""

from __future__ import annotations

from pathlib import Path

from packer.bench_report import KEYS, check_report
from packer.synthesize import synthesize
from tests.browser.engine_site import PAGE, running_engine_site
from tests.support.browser import running_browser
from tests.support.shapes import tiny_shape

SCRIPT = """async () => {
  const { EngineClient } = await import('/engine/client.js');
  const engine = await EngineClient.load('/packs/tiny/', { contextLength: 48 });
  const told = [];
  const report = await engine.measure({ quick: true, onProgress: (progress) => told.push(progress) });
  const stop = new AbortController();
  const code = await engine.measure({ signal: stop.signal, onProgress: () => stop.abort() }).then(
    () => 'none',
    (error) => error.code,
  );
  const ids = await engine.tokenizer.encode('still here');
  await engine.dispose();
  return { report, told, code, ids };
}"""


def test_through_the_worker(tmp_path: Path) -> None:
    synthesize(tiny_shape(), tmp_path / "tiny")
    with running_engine_site(tmp_path) as site, running_browser(webgpu=True) as browser:
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(site.address + PAGE)
        answer = page.evaluate(SCRIPT)
    report, told = answer["report"], answer["told"]
    assert set(check_report(report, "the page")) == set(KEYS)
    assert report["backend"] == "browser" and report["adapter"]["software"] is True
    assert [progress["done"] for progress in told] == list(range(len(told))) and told[-1]["label"] == "done"
    assert {progress["total"] for progress in told} == {len(told) - 1}
    assert answer["code"] == "aborted" and answer["ids"]
