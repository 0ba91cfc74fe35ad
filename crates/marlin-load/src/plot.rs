//! A plot of the distributions of times.

use crate::error::LoadError;
use crate::record::{Outcome, RequestRecord};
use plotters::coord::Shift;
use plotters::prelude::*;

const SIZE: (u32, u32) = (900, 640);
/// The font family. In SVG the viewer chooses the font; text is measured in DejaVu Sans.
pub(crate) const FONT: &str = "sans-serif";
pub(crate) const TEXT_SIZE: i32 = 15;
pub(crate) const INK: RGBColor = RGBColor(50, 50, 50);
pub(crate) const GRID: RGBColor = RGBColor(228, 228, 228);
const LINE: RGBColor = RGBColor(31, 105, 175);
/// The most points of a curve.
const POINTS: usize = 500;

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(crate) type DrawError = DrawingAreaErrorKind<std::io::Error>;

/// Returns an SVG with what a function draws on white.
pub(crate) fn svg(
    size: (u32, u32),
    draw: impl FnOnce(&Area<'_>) -> Result<(), DrawError>,
) -> Result<String, LoadError> {
    plotters::style::register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| LoadError::Plot("its font cannot be read".into()))?;
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    area.fill(&WHITE)
        .and_then(|()| draw(&area))
        .map_err(|error| LoadError::Plot(error.to_string()))?;
    drop(area);
    Ok(svg)
}

/// Draws the distribution of each kind of time of the completed requests.
pub(crate) fn distributions(requests: &[RequestRecord]) -> Result<String, LoadError> {
    let completed = || (requests.iter()).filter(|request| request.outcome == Outcome::Completed);
    let ttft = completed().filter_map(|request| request.ttft).collect();
    let tpot = completed().filter_map(RequestRecord::tpot).collect();
    let itl = completed()
        .flat_map(|request| request.itl.iter().copied())
        .collect();
    let e2el = completed().map(|request| request.latency).collect();
    let panels = [
        ("Time to first token (ms)", ttft),
        ("Time per output token (ms)", tpot),
        ("Inter-token latency (ms)", itl),
        ("End-to-end latency (ms)", e2el),
    ];
    svg(SIZE, |area| draw(area, panels))
}

fn draw(area: &Area<'_>, panels: [(&str, Vec<f64>); 4]) -> Result<(), DrawError> {
    for (panel, (title, times)) in area.split_evenly((2, 2)).iter().zip(panels) {
        let points = distribution(times);
        let last = points.last().map_or(0.0, |point| point.0);
        let text = (FONT, TEXT_SIZE, &INK);
        let mut chart = ChartBuilder::on(panel)
            .margin(15)
            .caption(title, text)
            .x_label_area_size(30)
            .y_label_area_size(50)
            // The axis has a length even without times.
            .build_cartesian_2d(0.0..last.max(0.001) * 1.05, 0.0..100.0)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(text)
            .x_labels(6)
            .y_labels(6)
            .y_label_formatter(&|percent| format!("{percent} %"))
            .draw()?;
        chart.draw_series([PathElement::new(points, LINE.stroke_width(2))])?;
    }
    area.present()
}

/// Returns points of milliseconds and the percentage of times that are not longer.
fn distribution(mut times: Vec<f64>) -> Vec<(f64, f64)> {
    times.sort_by(f64::total_cmp);
    let count = times.len();
    let kept = count.min(POINTS);
    // The last of each of `kept` parts, so that the longest time is among them.
    let points = (1..=kept).map(|part| {
        let rank = part * count / kept;
        (times[rank - 1] * 1e3, 100.0 * rank as f64 / count as f64)
    });
    points.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_ends_at_the_longest_time() {
        assert_eq!(distribution(Vec::new()), []);
        assert_eq!(
            distribution(vec![0.004, 0.001]),
            [(1.0, 50.0), (4.0, 100.0)]
        );
        let many = distribution((0..12_345).map(f64::from).collect());
        assert_eq!(many.len(), POINTS);
        assert_eq!(many[POINTS - 1], (12_344_000.0, 100.0));
    }

    #[test]
    fn a_run_without_times_has_a_plot() {
        let svg = distributions(&[]).unwrap();
        assert!(svg.contains("Inter-token latency"), "{svg}");
    }
}
