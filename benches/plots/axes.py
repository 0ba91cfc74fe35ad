"""The frame of a plot with two logarithmic axes, as an SVG."""

import math

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 50


def place(value, ticks, start, end):
    """The place of a value on a logarithmic axis between the first tick and the last."""
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    return start + (math.log(value) - low) / (high - low) * (end - start)


class Axes:
    """Two axes with their ticks and names, and the elements that are drawn on them."""

    def __init__(self, x_ticks, y_ticks, x_name, y_name, width=WIDTH, left=LEFT, font=16):
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        self.left, self.right = left, width - RIGHT
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="{font}">',
            f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        ]
        for tick in x_ticks:
            x = f"{self.x(tick):.1f}"
            self.parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
            self.parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tick:g}</text>')
        for tick in y_ticks:
            y = self.y(tick)
            self.parts.append(f'<line x1="{left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            self.parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        self.parts.append(f'<text x="{(left + self.right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{x_name}</text>')
        self.parts.append(f'<text x="18" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2})">{y_name}</text>')

    def x(self, value):
        return place(value, self.x_ticks, self.left, self.right)

    def y(self, value):
        return place(value, self.y_ticks, HEIGHT - BOTTOM, TOP)

    def curve(self, points, colour, dash):
        """Draws points (x, y, title), and lines between them."""
        line = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y, _ in points)
        self.parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        for x, y, title in points:
            self.parts.append(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.5" fill="{colour}"><title>{title}</title></circle>')

    def write(self, path):
        with open(path, "w") as file:
            file.write("\n".join([*self.parts, "</svg>"]) + "\n")
