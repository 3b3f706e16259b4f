"""The style of pages that commands write: light and dark by the reader's setting, light on paper."""

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1c2024; --soft: #5a6470; --rule: #d9dee4; --band: #f3f5f8;
  --c0: #0b5fd3; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #0e7490; --c5: #a16207; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --ink: #e6e9ed; --soft: #a0abb8; --rule: #343b44; --band: #1d2228;
  --c0: #6cb0ff; --c1: #ff9d66; --c2: #63d28a; --c3: #cf9cff; --c4: #5fd0e4; --c5: #e8c15a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 2.6rem 0 .3rem;
  padding-top: 1rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.meta, .note, footer { color: var(--soft); font-size: .875rem; }
.warn { border-left: 4px solid var(--c5); padding: .3rem .8rem; background: var(--band); }
nav ul { padding-left: 1.2rem; }
a { color: var(--c0); }
figure { margin: .6rem 0 1rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.scroll { overflow-x: auto; margin: .5rem 0; }
.scroll:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { padding-left: .4rem; }
thead th, thead td { border-bottom: 2px solid var(--ink); vertical-align: bottom; font-weight: 600; }
tbody th { font-weight: 400; min-width: 4rem; }
@media (min-width: 45rem) { tbody th { white-space: nowrap; } }
td.n, th.n { text-align: right; white-space: nowrap; }
tr.ours > * { font-weight: 700; background: var(--band); }
svg { display: block; width: 100%; min-width: 36rem; height: auto; font-size: 12.5px; fill: var(--ink); }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .label { fill: var(--soft); } svg .value { font-weight: 600; }
svg .grid { stroke: var(--rule); fill: none; } svg .axis { stroke: var(--ink); fill: none; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .s0 { stroke: var(--c0); stroke-width: 3; } svg .f0 { fill: var(--c0); }
svg .s1 { stroke: var(--c1); stroke-dasharray: 7 3; } svg .f1 { fill: var(--c1); }
svg .s2 { stroke: var(--c2); stroke-dasharray: 2 3; } svg .f2 { fill: var(--c2); }
svg .s3 { stroke: var(--c3); stroke-dasharray: 10 3 2 3; } svg .f3 { fill: var(--c3); }
svg .s4 { stroke: var(--c4); stroke-dasharray: 4 2; } svg .f4 { fill: var(--c4); }
svg .s5 { stroke: var(--c5); stroke-dasharray: 12 4; } svg .f5 { fill: var(--c5); }
@media print { :root { color-scheme: light;
  --page: #ffffff; --ink: #000000; --soft: #444444; --rule: #bbbbbb; --band: #f0f0f0;
  --c0: #0b5fd3; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #0e7490; --c5: #a16207; }
  figure, .scroll, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  section.model + section.model { break-before: page; } nav { display: none; }
  body { padding: 0; font-size: 13px; } .meta, .note, footer { font-size: 11.5px; }
  table { font-size: 10.5px; } th, td { padding-right: .5rem; } }
"""
