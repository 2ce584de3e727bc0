"""How the page and the report look: one style sheet, light and dark, from phone to wide screen."""

STYLE = """
:root { color-scheme: light dark; --paper:#f6f7f9; --card:#fff; --ink:#1b2530; --soft:#5d6975; --line:#d8dde3;
  --accent:#2468b8; --fine:#1c7c54; --warning:#9a6300; --failing:#b3261e; --info:#2468b8; }
@media (prefers-color-scheme: dark) { :root { --paper:#10151a; --card:#19212a; --ink:#e6ebf0; --soft:#9aa7b4;
  --line:#2f3a46; --accent:#7db2f2; --fine:#5fcf9f; --warning:#f0b455; --failing:#ff8a80; --info:#7db2f2; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; }
main { max-width:1240px; margin:0 auto; padding:1.2rem 1rem 4rem; }
h1 { font-size:1.35rem; margin:0; } h2 { font-size:1.15rem; margin:0; } h3 { font-size:.95rem; margin:1.3rem 0 .5rem; }
.soft { color:var(--soft); } .num { font-variant-numeric:tabular-nums; }
header { display:flex; flex-wrap:wrap; gap:.3rem 1rem; align-items:baseline; margin-bottom:1rem; }
#compare { margin-bottom:1rem; }
.runs { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,540px),1fr)); gap:1rem; align-items:start; }
.run { background:var(--card); border:1px solid var(--line); border-top:4px solid var(--soft); border-radius:10px;
  padding:1rem; min-width:0; }
.run.fine { border-top-color:var(--fine); } .run.warning { border-top-color:var(--warning); }
.run.failing { border-top-color:var(--failing); }
.badge { font-weight:650; } .badge.fine { color:var(--fine); } .badge.warning { color:var(--warning); }
.badge.failing { color:var(--failing); }
.run.cannot-judge { border-top-color:#a45cc4; } .badge.cannot-judge { color:#a45cc4; }
.bar { height:6px; background:var(--line); border-radius:3px; overflow:hidden; margin:.6rem 0; }
.bar i { display:block; height:100%; background:var(--accent); }
dl { display:grid; grid-template-columns:repeat(auto-fill,minmax(118px,1fr)); gap:.5rem .8rem; margin:.8rem 0 0; }
dt { color:var(--soft); font-size:.8rem; } dd { margin:0; font-variant-numeric:tabular-nums; font-weight:600; }
.alert { border-left:4px solid var(--info); background:var(--paper); border-radius:6px; padding:.5rem .7rem;
  margin:.5rem 0; overflow-wrap:anywhere; }
.alert.warn { border-color:var(--warning); } .alert.error { border-color:var(--failing); }
.alert.resolved { border-color:var(--line); opacity:.75; } .alert p { margin:.15rem 0; }
.plots { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr)); gap:.7rem; }
figure { margin:0; min-width:0; } figcaption { font-size:.83rem; color:var(--soft); }
svg { display:block; width:100%; height:auto; } svg text { fill:var(--soft); font-size:11px; }
.level { stroke:var(--line); } .curve { fill:none; stroke:var(--accent); stroke-width:1.8; }
.ended { fill:none; stroke:var(--failing); stroke-width:2; }
.mark { stroke-width:1.3; stroke-dasharray:4 3; stroke:var(--info); }
.mark.warn { stroke:var(--warning); } .mark.error { stroke:var(--failing); }
.c0 { stroke:var(--accent); color:var(--accent); } .c1 { stroke:#d0683a; color:#d0683a; }
.c2 { stroke:#1f9c82; color:#1f9c82; } .c3 { stroke:#a45cc4; color:#a45cc4; }
.buckets { display:flex; align-items:flex-end; gap:3px; height:54px; }
.buckets i { flex:1; background:var(--accent); border-radius:2px 2px 0 0; min-height:2px; }
table { border-collapse:collapse; width:100%; font-size:.9rem; font-variant-numeric:tabular-nums; }
th, td { text-align:left; padding:.3rem .6rem .3rem 0; border-bottom:1px solid var(--line); vertical-align:top; }
th { color:var(--soft); font-weight:500; font-size:.82rem; } td { overflow-wrap:anywhere; }
.scroll { overflow-x:auto; }
.sample { border-top:1px solid var(--line); padding:.45rem 0; overflow-wrap:anywhere; font-size:.92rem; }
.shares { display:flex; height:14px; border-radius:7px; overflow:hidden; background:var(--line); }
.shares i { display:block; height:100%; }
details { margin-top:.8rem; } summary { cursor:pointer; color:var(--soft); }
a { color:var(--accent); } code { font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
@media print { .run { break-inside:avoid; } }
"""
