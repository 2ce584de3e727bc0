"""How the report looks: one style sheet, light and dark, from phone to wide screen."""

STYLE = """
:root { color-scheme: light dark; --paper:#fbfcfd; --card:#fff; --ink:#1c2733; --soft:#5b6875; --line:#d5dbe1;
  --accent:#2f6fc4; --wrong:#fbe0d3; --wrong-ink:#8a3410; --good:#1f7d5e; }
@media (prefers-color-scheme: dark) { :root { --paper:#11161c; --card:#182029; --ink:#e4e9ee; --soft:#97a4b1;
  --line:#303b46; --accent:#74a9ee; --wrong:#4d2a1b; --wrong-ink:#f4b898; --good:#5cc9a3; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink);
  font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; }
main { max-width:1080px; margin:0 auto; padding:2.2rem 1.1rem 4rem; }
h1 { font-size:1.7rem; line-height:1.2; margin:0 0 .3rem; letter-spacing:-.01em; }
h2 { font-size:1.2rem; margin:2.6rem 0 .8rem; }
p { margin:.4rem 0; max-width:46rem; }
.soft, figcaption, th { color:var(--soft); }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(155px,1fr)); gap:.8rem;
  margin-top:1.4rem; }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:.9rem 1rem; }
.card b { display:block; font-size:1.65rem; line-height:1.25; font-weight:650;
  font-variant-numeric:tabular-nums; }
.card span { display:block; font-size:.86rem; }
.card .soft { font-size:.8rem; }
.notes { border-left:3px solid var(--accent); padding:.1rem 0 .1rem .9rem; margin-top:1.2rem; }
.plots { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,410px),1fr)); gap:.9rem; }
figure { margin:0; background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:.9rem 1rem .8rem; min-width:0; }
figure h3 { margin:0 0 .5rem; font-size:1rem; }
figure svg { display:block; width:100%; height:auto; color:var(--ink); }
figure svg text { font-family:inherit !important; }
figcaption { font-size:.86rem; margin-top:.4rem; }
.scroll { overflow-x:auto; background:var(--card); border:1px solid var(--line); border-radius:10px; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; font-size:.92rem; }
th, td { padding:.45rem .6rem; text-align:right; white-space:nowrap; border-bottom:1px solid var(--line); }
tr:last-child > * { border-bottom:0; }
th { font-weight:500; font-size:.84rem; vertical-align:bottom; }
th:first-child, td:first-child { text-align:left; white-space:normal; min-width:9rem; }
.example { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:.8rem 1rem;
  margin-bottom:.8rem; display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,215px),1fr));
  gap:.9rem 1.3rem; }
.example h4 { margin:0 0 .15rem; font-size:.78rem; font-weight:500; color:var(--soft); }
.example p { margin:0; font-size:.95rem; overflow-wrap:anywhere; }
mark { background:var(--wrong); color:var(--wrong-ink); border-radius:3px; padding:0 .15em; }
details { margin-top:.7rem; background:var(--card); border:1px solid var(--line); border-radius:10px;
  padding:.6rem 1rem; }
summary { cursor:pointer; }
details table { margin-top:.5rem; font-size:.86rem; }
details td { white-space:normal; overflow-wrap:anywhere; text-align:left; vertical-align:top; }
details td:first-child { color:var(--soft); white-space:nowrap; width:1%; }
code, pre { font:.88em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; }
pre { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:.7rem 1rem;
  overflow-x:auto; }
@media print { figure, .example, .card { break-inside:avoid; } }
"""
