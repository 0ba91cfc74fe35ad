use super::*;
use marlin_testing::rng;
use rand::RngExt;
use resvg::usvg::roxmltree;

fn point(label: &str, bytes: usize, perplexity: f64, error: f64) -> Point {
    Point {
        label: label.into(),
        bytes,
        perplexity,
        error,
    }
}

fn plot(points: Vec<Point>) -> Plot {
    Plot {
        caption: "16352 tokens".into(),
        points,
    }
}

/// Returns all texts of an SVG.
fn texts(svg: &str) -> Vec<String> {
    let tree = roxmltree::Document::parse(svg).unwrap();
    let texts = tree.descendants().filter(|node| node.has_tag_name("text"));
    texts
        .map(|node| node.text().unwrap_or_default().trim().to_owned())
        .collect()
}

#[test]
fn a_file_is_what_its_ending_says() {
    let kind = |name: &str| PlotFile::try_from(PathBuf::from(name)).map(|file| file.kind);
    assert_eq!(
        [kind("a/b.svg"), kind("b.PNG"), kind("b.svg.png")],
        [Ok(Kind::Svg), Ok(Kind::Png), Ok(Kind::Png)]
    );
    assert!(
        ["plot", "svg", ".svg", "plot.pdf"]
            .map(kind)
            .iter()
            .all(Result::is_err)
    );
}

#[test]
fn every_model_has_its_label_whatever_is_in_its_name() {
    let long = "a-very-long-name-".repeat(20);
    let labels = [
        "model",
        "<&>\"'",
        "tab\tand \u{1b}[1m",
        long.as_str(),
        "ГОСТ-é",
    ];
    let points = labels.iter().enumerate().map(|(index, label)| {
        point(
            label,
            4_000_000 + index * 900_000,
            5.0 + index as f64 / 10.0,
            0.1,
        )
    });
    let texts = texts(&plot(points.collect()).svg().unwrap());
    for expected in [
        "16352 tokens",
        "perplexity",
        "size of all tensors (kB)",
        "model (reference)",
        "<&>\"'",
        "ГОСТ-é",
    ] {
        assert!(
            texts.iter().any(|text| text == expected),
            "`{expected}` is not in {texts:?}"
        );
    }
    assert!(
        texts
            .iter()
            .any(|text| text.starts_with("…") && text.ends_with("-very-long-name-")),
        "{texts:?}"
    );
    assert!(!texts.concat().contains(char::is_control));
}

/// Tests that the text of a PNG is drawn without any font of the system: pixels differ from those
/// of a PNG without the text.
#[test]
fn a_png_has_text() {
    let pixels = |plot: &Plot| Pixmap::decode_png(&png(&plot.svg().unwrap()).unwrap()).unwrap();
    let [with, without] = ["12345 tokens", ""].map(|caption| {
        let points = vec![
            point("a", 2_000, 3.0, 0.2),
            point("b", 1_000, 4.0, f64::NAN),
        ];
        pixels(&Plot {
            caption: caption.into(),
            points,
        })
    });
    assert_eq!((with.width(), with.height()), (1600, 1000));
    let differ = with
        .pixels()
        .iter()
        .zip(without.pixels())
        .filter(|(with, without)| with != without)
        .count();
    assert!((500..20_000).contains(&differ), "{differ}");
}

#[test]
fn labels_are_in_the_frame_and_apart_from_each_other() {
    let mut rng = rng();
    let frame = Rect {
        left: 80,
        top: 46,
        right: 776,
        bottom: 434,
    };
    for _ in 0..50 {
        let points: Vec<(i32, i32)> = (0..8)
            .map(|_| (rng.random_range(110..740), rng.random_range(70..410)))
            .collect();
        let around = |(x, y): (i32, i32)| Rect {
            left: x - 5,
            top: y - 5,
            right: x + 5,
            bottom: y + 5,
        };
        let line = Rect {
            top: points[0].1 - 1,
            bottom: points[0].1 + 1,
            ..frame
        };
        let mut taken: Vec<Rect> = points.iter().copied().map(around).collect();
        for (index, &point) in points.iter().enumerate() {
            let others: Vec<Rect> = taken
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != index)
                .map(|(_, rect)| *rect)
                .collect();
            let rect = free_rect(
                point,
                (rng.random_range(20..200), TEXT_SIZE),
                &frame,
                &taken[index],
                &others,
                &line,
            );
            assert!(frame.contains(&rect), "{rect:?}");
            assert!(
                !taken
                    .iter()
                    .chain([&line])
                    .any(|other| other.overlaps(&rect)),
                "{rect:?}, {taken:?}"
            );
            taken.push(rect);
        }
    }
}

#[test]
fn ticks_are_round_and_few() {
    let mut rng = rng();
    for _ in 0..1000 {
        let low = 10f64.powf(rng.random_range(-1.0..6.0));
        let high = low * 10f64.powf(rng.random_range(0.001..4.0));
        let axis = Axis::new([high, low].into_iter(), 400, 0);
        let ticks = axis.ticks();
        assert!(
            (2..=12).contains(&ticks.len()),
            "{low} to {high}: {ticks:?}"
        );
        assert!(
            ticks.is_sorted_by(|(first, _), (second, _)| first > second),
            "{ticks:?}"
        );
        for (place, label) in ticks {
            assert!((0..=400).contains(&place), "{label} at {place}");
            let value: f64 = label.parse().unwrap();
            // The tick is at the place of its value.
            assert!((axis.place(value) - place).abs() <= 1, "{label}");
        }
    }
    // A single value.
    assert!(Axis::new([5.37].into_iter(), 0, 100).ticks().len() > 1);
}

#[test]
fn what_is_no_number_is_not_drawn() {
    let error = plot(vec![point("a", 1, f64::INFINITY, 0.0)])
        .svg()
        .unwrap_err()
        .to_string();
    assert!(error.contains("perplexity of a is inf"), "{error}");
}
