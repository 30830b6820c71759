"""curve.csv -> curve.svg, without any library: held-out and training loss against tokens.

    python3 curve.py curve.csv curve.svg
"""
import csv, sys

W, H, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 52, 16, 16, 40
LOW, HIGH = 1.0, 2.6                       # nats a token shown


def main():
    rows = list(csv.DictReader(open(sys.argv[1])))
    most = max(float(r["tokens"]) for r in rows)
    x = lambda t: LEFT + float(t) / most * (W - LEFT - RIGHT)
    y = lambda v: TOP + (HIGH - min(float(v), HIGH)) / (HIGH - LOW) * (H - TOP - BOTTOM)
    line = lambda key, style: '<polyline fill="none" %s points="%s"/>' % (style, " ".join(f"{x(r['tokens']):.1f},{y(r[key]):.1f}" for r in rows if r[key] and float(r[key]) < HIGH))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" font-family="sans-serif" font-size="12">', f'<rect width="{W}" height="{H}" fill="#fff"/>']
    v = LOW
    while v <= HIGH + 1e-9:
        out.append(f'<line x1="{LEFT}" x2="{W - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/><text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.1f}</text>')
        v += 0.2
    for m in range(0, int(most / 1e6) + 1, 25):
        out.append(f'<text x="{x(m * 1e6):.1f}" y="{H - BOTTOM + 18}" text-anchor="middle">{m}M</text>')
    out.append(f'<text x="{W / 2}" y="{H - 6}" text-anchor="middle">tokens</text>')
    out.append(line("loss", 'stroke="#2563eb" stroke-width="1"') + line("draft1", 'stroke="#d97706" stroke-width="1"'))
    held = [r for r in rows if r.get("valid_core")]
    out += [f'<circle cx="{x(r["tokens"]):.1f}" cy="{y(r["valid_core"]):.1f}" r="4" fill="#111"/>' for r in held]
    for i, (name, colour) in enumerate((("training loss, nats a token", "#2563eb"), ("first draft's loss", "#d97706"), ("held-out loss, 32 sequences, sparse", "#111"))):
        out.append(f'<rect x="{W - 270}" y="{TOP + 10 + 20 * i}" width="12" height="12" fill="{colour}"/><text x="{W - 252}" y="{TOP + 20 + 20 * i}">{name}</text>')
    open(sys.argv[2], "w").write("\n".join(out) + "\n</svg>\n")


if __name__ == "__main__":
    main()
