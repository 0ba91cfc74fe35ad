//! A plot of latencies against the rate of requests.

use crate::error::LoadError;
use crate::plot::{self, Area, DrawError, GRID, INK};
use plotters::prelude::*;
use serde::Deserialize;

const SIZE: (u32, u32) = (1200, 380);
/// The colours of the lines, which a reader who sees no colours tells apart by the marks.
const COLOURS: [RGBColor; 5] = [
    RGBColor(31, 105, 175),
    RGBColor(200, 85, 20),
    RGBColor(40, 130, 60),
    RGBColor(130, 60, 150),
    RGBColor(90, 90, 90),
];

/// The latencies at a rate. It can be read from the JSON of a report, also of `vllm bench serve`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct RatePoint {
    /// The requests that were sent a second.
    pub request_rate: f64,
    /// The mean time per output token, in milliseconds.
    pub mean_tpot_ms: f64,
    /// The mean time to the first token, in milliseconds.
    pub mean_ttft_ms: f64,
    /// The 99th percentile of the time to the first token, in milliseconds.
    pub p99_ttft_ms: f64,
}

/// Runs of one server at several rates: a line of a plot.
#[derive(Debug, Clone, PartialEq)]
pub struct RateSeries {
    /// The name in the legend.
    pub name: String,
    /// The runs in ascending order of their rates.
    pub points: Vec<RatePoint>,
}

/// Returns an SVG with the mean TPOT, the mean TTFT and the 99th percentile of TTFT against the
/// rate of requests.
///
/// # Errors
///
/// If a number is not finite, or the plot cannot be drawn.
pub fn rates_svg(series: &[RateSeries]) -> Result<String, LoadError> {
    for line in series {
        for point in &line.points {
            let RatePoint {
                request_rate,
                mean_tpot_ms,
                mean_ttft_ms,
                p99_ttft_ms,
            } = *point;
            let numbers = [request_rate, mean_tpot_ms, mean_ttft_ms, p99_ttft_ms];
            if let Some(number) = numbers.iter().find(|number| !number.is_finite()) {
                let name = &line.name;
                return Err(LoadError::Plot(format!("a figure of `{name}` is {number}")));
            }
        }
    }
    plot::svg(SIZE, |area| draw(area, series))
}

fn draw(area: &Area<'_>, series: &[RateSeries]) -> Result<(), DrawError> {
    type Figure = fn(&RatePoint) -> f64;
    let panels: [(&str, Figure); 3] = [
        ("Mean time per output token (ms)", |point| {
            point.mean_tpot_ms
        }),
        ("Mean time to first token (ms)", |point| point.mean_ttft_ms),
        ("P99 time to first token (ms)", |point| point.p99_ttft_ms),
    ];
    let points = || series.iter().flat_map(|line| &line.points);
    let last = points().map(|point| point.request_rate).fold(0.0, f64::max);
    let areas = area.split_evenly((1, 3));
    for (position, (panel, (title, figure))) in areas.iter().zip(panels).enumerate() {
        let most = points().map(figure).fold(0.0, f64::max);
        let text = (plot::FONT, plot::TEXT_SIZE, &INK);
        // Axes have a length even without points.
        let (last, most) = (last.max(0.001) * 1.05, most.max(0.001) * 1.1);
        let mut chart = ChartBuilder::on(panel)
            .margin(15)
            .caption(title, text)
            .x_label_area_size(45)
            .y_label_area_size(55)
            .build_cartesian_2d(0.0..last, 0.0..most)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(text)
            .x_desc("requests a second")
            .x_labels(6)
            .y_labels(6)
            .draw()?;
        for (index, line) in series.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let places = line.points.iter();
            let places: Vec<(f64, f64)> = places
                .map(|point| (point.request_rate, figure(point)))
                .collect();
            chart
                .draw_series([PathElement::new(places.clone(), colour.stroke_width(2))])?
                .label(&line.name)
                .legend(move |(x, y)| {
                    EmptyElement::at((x, y))
                        + PathElement::new([(0, 0), (24, 0)], colour.stroke_width(2))
                        + mark(index, colour, 12)
                });
            chart.draw_series(
                places
                    .into_iter()
                    .map(|place| EmptyElement::at(place) + mark(index, colour, 0)),
            )?;
        }
        // One legend, where lines that rise leave room.
        if position == 0 && !series.is_empty() {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .legend_area_size(30)
                .background_style(WHITE.mix(0.8))
                .label_font(text)
                .draw()?;
        }
    }
    area.present()
}

/// Returns the mark of a line, `x` pixels right of its place: a disc, a square, a diamond or a
/// triangle.
fn mark(index: usize, colour: RGBColor, x: i32) -> Polygon<(i32, i32)> {
    const RADIUS: f64 = 5.0;
    let corners = [24, 4, 4, 3][index % 4];
    let turn = [0.0, 0.125, 0.0, 0.25][index % 4];
    let corner = |corner: i32| {
        let angle = std::f64::consts::TAU * (f64::from(corner) / f64::from(corners) - turn);
        let (sine, cosine) = angle.sin_cos();
        (
            x + (RADIUS * cosine).round() as i32,
            (RADIUS * sine).round() as i32,
        )
    };
    Polygon::new(
        (0..corners).map(corner).collect::<Vec<_>>(),
        colour.filled(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> Vec<RateSeries> {
        let points = |factor: f64| {
            let rates = [1.0, 2.0, 5.0, 10.0];
            let point = |rate: f64| RatePoint {
                request_rate: rate,
                mean_tpot_ms: factor * (3.0 + rate),
                mean_ttft_ms: factor * 12.0,
                p99_ttft_ms: factor * (20.0 + rate * rate),
            };
            rates.map(point).to_vec()
        };
        let names = ["f16", "int4", "2:4 int4", "w8"];
        let series = names.iter().zip([2.0, 1.0, 0.9, 1.5]);
        series
            .map(|(name, factor)| RateSeries {
                name: (*name).into(),
                points: points(factor),
            })
            .collect()
    }

    #[test]
    fn lines_have_names_and_marks() {
        let svg = rates_svg(&series()).unwrap();
        for text in ["f16", "2:4 int4", "requests a second"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        // A mark for each point in each panel, and for each line in the legend.
        assert_eq!(svg.matches("<polygon").count(), 3 * 4 * 4 + 4);
        let mut broken = series();
        broken[1].points[2].p99_ttft_ms = f64::NAN;
        let error = rates_svg(&broken).unwrap_err().to_string();
        assert!(error.contains("int4") && error.contains("NaN"), "{error}");
        rates_svg(&[]).unwrap();
    }
}
