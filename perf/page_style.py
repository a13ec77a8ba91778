"""Style of the HTML report."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1c2024; --quiet: #5b636b; --line: #e2e6ea; --tile: #f6f8fa;
  --bad: #b3261e;
  --series-0: #2f6fd0; --series-1: #c2571a; --series-2: #2e8b57; --series-3: #8a4fbf;
  --series-4: #b58900; --series-5: #4c7a8a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181b; --text: #e4e8ec; --quiet: #9aa4ae; --line: #2c3238; --tile: #1b2025;
    --bad: #ff8a80;
    --series-0: #6ea3f5; --series-1: #f0965c; --series-2: #63c795; --series-3: #c39bf0;
    --series-4: #e0bd4f; --series-5: #8fbccb;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 22px; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 40px 0 2px; padding-top: 14px; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
h3 { font-size: 16px; margin: 26px 0 2px; }
a { color: var(--series-0); margin-right: 14px; }
.facts { margin: 2px 0 8px; color: var(--quiet); overflow-wrap: anywhere; }
.plot { background: var(--tile); border-radius: 8px; padding: 10px; max-width: 820px; }
.many { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 12px; }
figure { margin: 0; background: var(--tile); border-radius: 8px; padding: 8px; min-width: 0; }
figcaption { font-size: 12px; color: var(--quiet); overflow-wrap: anywhere; }
.plot { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
.plot svg { min-width: 520px; }
svg text { fill: var(--text);
  font: var(--text-size) system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .tick, svg .axis { fill: var(--quiet); }
svg .note { font-size: var(--note-size); }
.lead { stroke: var(--quiet); stroke-width: 0.6; }
.grid { stroke: var(--line); }
.line { fill: none; stroke: var(--c); stroke-width: 2; }
.point { fill: var(--c); stroke: var(--tile); stroke-width: 1; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0;
  margin: 6px 4px 0; color: var(--quiet); font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
details { margin-top: 22px; border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
summary { cursor: pointer; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin-top: 8px; width: 100%; }
th, td { text-align: left; padding: 3px 12px 3px 0; white-space: nowrap;
  font-variant-numeric: tabular-nums; border-top: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; border-top: none; }
tr.bad td:nth-child(7) { color: var(--bad); }
tr.quiet td:nth-child(7) { color: var(--quiet); }
"""
