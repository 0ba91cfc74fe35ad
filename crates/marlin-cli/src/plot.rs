//! Plots of perplexity against size, as SVG or PNG.
//!
//! All positions are in pixels of the SVG. A PNG is the SVG at twice the resolution, with a font
//! that comes with the program.

mod axis;
mod rect;

use crate::error::CliError;
use crate::output;
use axis::Axis;
use marlin_format::without_control;
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use rect::{Rect, free_rect};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg;
use std::path::PathBuf;

const SIZE: (u32, u32) = (800, 500);
/// The pixels of a PNG, in each direction, for one pixel of the SVG.
const PNG_SCALE: u32 = 2;
/// The font family. In SVG the viewer chooses the font; text is measured, and drawn in PNG, in
/// DejaVu Sans.
const FONT: &str = "sans-serif";
const TEXT_SIZE: i32 = 15;
const RADIUS: i32 = 5;

const INK: RGBColor = RGBColor(50, 50, 50);
const GRID: RGBColor = RGBColor(228, 228, 228);
const MODEL: RGBColor = RGBColor(31, 105, 175);
const REFERENCE: RGBColor = RGBColor(200, 85, 20);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A file to draw into; its extension decides the format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlotFile {
    path: PathBuf,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Svg,
    Png,
}

impl TryFrom<PathBuf> for PlotFile {
    type Error = &'static str;

    fn try_from(path: PathBuf) -> Result<Self, Self::Error> {
        let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
        let kind = match ending.as_ref().and_then(|ending| ending.to_str()) {
            Some("svg") => Kind::Svg,
            Some("png") => Kind::Png,
            _ => return Err("a plot is an `.svg` or a `.png` file"),
        };
        Ok(Self { path, kind })
    }
}

/// A model in a plot.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    pub label: String,
    pub bytes: usize,
    pub perplexity: f64,
    /// The standard error of the difference from the reference's perplexity; NaN if there is none.
    pub error: f64,
}

/// The models to draw. The first is the reference.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    pub caption: String,
    pub points: Vec<Point>,
}

impl Plot {
    /// Draws the plot and writes it to a file.
    pub fn write(&self, file: &PlotFile) -> Result<(), CliError> {
        let svg = self.svg()?;
        let bytes = match file.kind {
            Kind::Svg => svg.into_bytes(),
            Kind::Png => png(&svg)?,
        };
        std::fs::write(&file.path, bytes).map_err(|source| CliError::Write {
            path: file.path.clone(),
            source,
        })
    }

    fn svg(&self) -> Result<String, CliError> {
        if let Some(point) = self
            .points
            .iter()
            .find(|point| !point.perplexity.is_finite())
        {
            return Err(CliError::Plot(format!(
                "the perplexity of {} is {}",
                point.label, point.perplexity
            )));
        }
        plotters::style::register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
            .map_err(|_| CliError::Plot("its font cannot be read".into()))?;
        let mut svg = String::new();
        self.draw(&SVGBackend::with_string(&mut svg, SIZE).into_drawing_area())
            .map_err(|error| CliError::Plot(error.to_string()))?;
        Ok(svg)
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        area.fill(&WHITE)?;
        let (factor, unit) = output::size_unit(
            self.points
                .iter()
                .map(|point| point.bytes)
                .max()
                .unwrap_or(0),
        );
        let bars = self.points.iter().flat_map(|point| {
            let error = if point.error.is_finite() {
                point.error
            } else {
                0.0
            };
            [point.perplexity - error, point.perplexity + error]
        });
        let (width, height) = (SIZE.0 as i32, SIZE.1 as i32);
        let vertical = Axis::new(bars, height - 66, 46);
        let labels = vertical
            .ticks()
            .into_iter()
            .map(|(_, label)| Ok(text_size(area, &label)?.0));
        let left = 48
            + labels
                .collect::<Result<Vec<_>, _>>()?
                .into_iter()
                .max()
                .unwrap_or(0);
        let horizontal = Axis::new(
            self.points.iter().map(|point| point.bytes as f64 / factor),
            left,
            width - 36,
        );
        let frame = Rect {
            left,
            top: vertical.end,
            right: horizontal.end,
            bottom: vertical.start,
        };

        let middle = (frame.left + frame.right) / 2;
        area.draw(&Text::new(
            self.caption.clone(),
            (middle, 16),
            style(HPos::Center, VPos::Top),
        ))?;
        for (place, label) in horizontal.ticks() {
            area.draw(&PathElement::new(
                [(place, frame.top), (place, frame.bottom)],
                GRID,
            ))?;
            area.draw(&Text::new(
                label,
                (place, frame.bottom + 8),
                style(HPos::Center, VPos::Top),
            ))?;
        }
        for (place, label) in vertical.ticks() {
            area.draw(&PathElement::new(
                [(frame.left, place), (frame.right, place)],
                GRID,
            ))?;
            area.draw(&Text::new(
                label,
                (frame.left - 8, place),
                style(HPos::Right, VPos::Center),
            ))?;
        }
        area.draw(&Text::new(
            format!("size of all tensors ({unit})"),
            (middle, height - 34),
            style(HPos::Center, VPos::Top),
        ))?;
        let upright = style(HPos::Center, VPos::Top).transform(FontTransform::Rotate270);
        area.draw(&Text::new(
            "perplexity",
            (14, (frame.top + frame.bottom) / 2),
            upright,
        ))?;

        if let Some(reference) = self.points.first().filter(|_| self.points.len() > 1) {
            let y = vertical.place(reference.perplexity);
            area.draw(&DashedPathElement::new(
                [(frame.left, y), (frame.right, y)],
                6,
                4,
                REFERENCE.mix(0.6),
            ))?;
        }
        area.draw(&PathElement::new(frame.corners(), INK))?;

        let centre = |point: &Point| {
            (
                horizontal.place(point.bytes as f64 / factor),
                vertical.place(point.perplexity),
            )
        };
        let bar = |point: &Point| {
            let ((x, y), error) = (centre(point), point.error);
            let [top, bottom] = if error.is_finite() {
                [error, -error].map(|error| vertical.place(point.perplexity + error))
            } else {
                [y; 2]
            };
            Rect {
                left: x - RADIUS - 2,
                top: top.min(y - RADIUS),
                right: x + RADIUS + 2,
                bottom: bottom.max(y + RADIUS),
            }
        };
        let mut taken: Vec<Rect> = self.points.iter().map(bar).collect();
        // Labels do not overlap the line of the reference.
        let line = self
            .points
            .first()
            .map_or(0, |reference| vertical.place(reference.perplexity));
        let line = Rect {
            left: frame.left,
            top: line - 1,
            right: frame.right,
            bottom: line + 1,
        };
        let colour = |index| if index == 0 { REFERENCE } else { MODEL };
        for (index, point) in self.points.iter().enumerate() {
            let (x, _) = centre(point);
            if point.error.is_finite() {
                let [top, bottom] = [point.error, -point.error]
                    .map(|error| vertical.place(point.perplexity + error));
                for line in [
                    [(x, top), (x, bottom)],
                    [(x - 4, top), (x + 4, top)],
                    [(x - 4, bottom), (x + 4, bottom)],
                ] {
                    area.draw(&PathElement::new(line, colour(index).mix(0.6)))?;
                }
            }
        }
        for (index, point) in self.points.iter().enumerate() {
            let label = self.label(area, index, (frame.right - frame.left) / 2)?;
            let others: Vec<Rect> = taken
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != index)
                .map(|(_, rect)| *rect)
                .collect();
            let rect = free_rect(
                centre(point),
                text_size(area, &label)?,
                &frame,
                &taken[index],
                &others,
                &line,
            );
            if let Some(line) = rect.line_from(centre(point)) {
                area.draw(&PathElement::new(line, INK.mix(0.5)))?;
            }
            area.draw(&Rectangle::new(
                [(rect.left, rect.top), (rect.right, rect.bottom)],
                WHITE.mix(0.8).filled(),
            ))?;
            area.draw(&Text::new(
                label,
                (rect.left, (rect.top + rect.bottom) / 2),
                style(HPos::Left, VPos::Center),
            ))?;
            taken.push(rect);
        }
        for (index, point) in self.points.iter().enumerate() {
            area.draw(&Circle::new(centre(point), RADIUS, colour(index).filled()))?;
        }
        area.present()
    }

    /// Returns the label of a point. The label's beginning is cut off if the label is wider than
    /// `widest`.
    fn label(
        &self,
        area: &Area<'_>,
        index: usize,
        widest: i32,
    ) -> Result<String, DrawingAreaErrorKind<std::io::Error>> {
        let suffix = if index == 0 && self.points.len() > 1 {
            " (reference)"
        } else {
            ""
        };
        let label = without_control(&self.points[index].label).replace(['\n', '\t'], " ");
        let mut shown = format!("{label}{suffix}");
        let mut rest = label.chars();
        while text_size(area, &shown)?.0 > widest && rest.next().is_some() {
            shown = format!("…{}{suffix}", rest.as_str());
        }
        Ok(shown)
    }
}

fn style(horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    (FONT, TEXT_SIZE)
        .into_font()
        .color(&INK)
        .pos(Pos::new(horizontal, vertical))
}

fn text_size(
    area: &Area<'_>,
    text: &str,
) -> Result<(i32, i32), DrawingAreaErrorKind<std::io::Error>> {
    let (width, _) = area.estimate_text_size(text, &style(HPos::Left, VPos::Center))?;
    Ok((width as i32, TEXT_SIZE))
}

fn png(svg: &str) -> Result<Vec<u8>, CliError> {
    let failed = |error: &dyn std::fmt::Display| CliError::Plot(error.to_string());
    let mut options = usvg::Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_font_data(dejavu::sans::regular().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    let tree = usvg::Tree::from_str(svg, &options).map_err(|error| failed(&error))?;
    let mut pixels =
        Pixmap::new(PNG_SCALE * SIZE.0, PNG_SCALE * SIZE.1).ok_or_else(|| failed(&"no memory"))?;
    let scale = PNG_SCALE as f32;
    resvg::render(
        &tree,
        Transform::from_scale(scale, scale),
        &mut pixels.as_mut(),
    );
    pixels.encode_png().map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests;
