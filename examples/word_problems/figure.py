"""Draws the figure of race.py as SVG, readable on light and dark pages."""

import math

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 74, 56
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 }
  .grid { stroke: #1f2328; stroke-opacity: .12 }
  .line { fill: none; stroke-width: 1.8; stroke-opacity: .85 }
  .s0 { stroke: #b3470a } .s1 { stroke: #0b62b8; stroke-dasharray: 6 3 }
  .d0 { fill: #b3470a } .d1 { fill: #0b62b8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .grid { stroke: #e6edf3; stroke-opacity: .18 }
    .s0 { stroke: #ff9b52 } .s1 { stroke: #6cb6ff } .d0 { fill: #ff9b52 } .d1 { fill: #6cb6ff }
  }
"""


def tick_step(largest, count):
    """Returns a round distance between ticks, for at most `count` ticks."""
    power = 10 ** math.floor(math.log10(largest / count))
    return next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= count)


def draw(series):
    """Draws `series`: name -> runs, each with its `curve` of (seconds, accuracy), and `peak_rss_mib`."""
    longest = max(seconds for runs in series.values() for run in runs for seconds, _ in run["curve"])
    x = lambda seconds: LEFT + (WIDTH - LEFT - RIGHT) * seconds / longest
    y = lambda accuracy: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * accuracy
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">', f"<style>{STYLE}</style>"]
    parts.append(f'<text class="title" x="{LEFT}" y="24">Word problems: held-out accuracy over seconds of training</text>')
    for percent in range(0, 101, 20):
        level = y(percent / 100)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 5:.1f}" text-anchor="end">{percent} %</text>')
    step = tick_step(longest, 8)
    for tick in range(int(longest // step) + 1):
        parts.append(f'<text x="{x(tick * step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick * step:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">seconds of training</text>')
    for index, (name, runs) in enumerate(series.items()):
        for run in runs:
            points = [(x(seconds), y(accuracy)) for seconds, accuracy in run["curve"]]
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            parts.append(f'<polyline class="line s{index}" points="{line}"/>')
            parts += [f'<circle class="d{index}" cx="{a:.1f}" cy="{b:.1f}" r="2.4"/>' for a, b in points]
        memory = max(run["peak_rss_mib"] for run in runs)
        left = LEFT + 330 * index
        parts.append(f'<line class="line s{index}" x1="{left}" x2="{left + 32}" y1="48" y2="48"/>')
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        parts.append(f'<text x="{left + 40}" y="53">{name}: {seeds}, at most {memory:.0f} MiB</text>')
    return "\n".join([*parts, "</svg>\n"])
