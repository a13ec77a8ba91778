"""Style of the HTML report."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1c2024; --quiet: #5b636b; --line: #d5dae0; --tile: #f3f5f7;
  --ours: #d7e6fb; --generated: #dcf1de; --library: #eceef1; --edge: #97a1ab;
  --floor: #9aa5b1; --measured: #2f6fd0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181b; --text: #e4e8ec; --quiet: #9aa4ae; --line: #363c43; --tile: #1f2429;
    --ours: #1d3a60; --generated: #1f4429; --library: #30363c; --edge: #67727d;
    --floor: #66717c; --measured: #6ea3f5;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 22px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 4px; }
.facts { margin: 4px 0 10px; color: var(--quiet); overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 8px; }
.tiles div { background: var(--tile); border-radius: 6px; padding: 8px 10px; }
.tiles b { display: block; font-size: 17px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--quiet); font-size: 13px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0;
  color: var(--quiet); font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; border: 1px solid var(--line); }
i.ours { background: var(--ours); } i.generated { background: var(--generated); }
i.library { background: var(--library); } i.floor { background: var(--floor); }
i.measured { background: var(--measured); }
.drawing, .wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { fill: var(--text); font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .name { font-weight: 600; }
svg .detail, svg .value { fill: var(--quiet); font-size: 11px; }
svg rect { stroke: var(--line); }
rect.ours { fill: var(--ours); } rect.generated { fill: var(--generated); }
rect.library { fill: var(--library); }
rect.floor { fill: var(--floor); stroke: none; }
rect.measured { fill: var(--measured); stroke: none; }
.edge { fill: none; stroke: var(--edge); stroke-width: 1.5; }
details { border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px; }
summary { cursor: pointer; }
table { border-collapse: collapse; font-size: 13px; margin-top: 8px; width: 100%; }
th, td { text-align: left; padding: 3px 10px 3px 0; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 500; }
tbody tr:not(.why) td { border-top: 1px solid var(--line); padding-top: 6px; }
tr.why td { white-space: normal; color: var(--quiet); padding-bottom: 6px; }
tr.why ul { margin: 0; padding-left: 18px; }
"""
