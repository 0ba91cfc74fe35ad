use super::Format;
use super::accuracy::{RECORDS, note};
use super::cards::{CARDS, CardSpec, H100, H200};
use super::cost::{self, Basis, REFERENCES};
use super::models::Model;
use super::records::{DECODE, DTYPE, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, Record};
use marlin_lm::KvCache;
use marlin_testing::{expect_page, repository_file};
use serde_json::Value;

fn record_text(file: &str) -> String {
    let path = repository_file(&format!("benches/records/{file}"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn model_name(model: Model) -> &'static str {
    match model {
        Model::Llama2Seven => "llama-2-7b",
        Model::Llama3Eight => "llama-3-8b",
        Model::Llama2Seventy => "llama-2-70b",
        Model::Qwen3Thirty => "qwen3-30b-a3b",
        Model::Shipped => "train-tiny-llama",
    }
}

/// Returns the name of a format in the records; int4 in groups of 32 is in none.
fn weights_name(format: Format) -> &'static str {
    match format {
        Format::F16 => "f16",
        Format::Int8 => "w8a16",
        Format::Int8TwoFour => "w8a16-24",
        Format::Fp8 => "fp8",
        Format::Fp8W8A8 => "fp8-w8a8",
        Format::Nvfp4 => "nvfp4",
        Format::Mxfp4 => "mxfp4",
        Format::Int4 => "w4a16",
        Format::Int4TwoFour => "w4a16-24",
        Format::Int4G32 => "none",
    }
}

/// Returns the first number in the column of a file for a run of decode: of a JSON record its
/// field, of a log the cell below the header.
fn decode_figure(record: &Record, sequences: usize, field: &str, cell: usize) -> f64 {
    let text = record_text(record.file);
    let (model, weights) = (model_name(record.model), weights_name(record.format));
    if record.file.ends_with(".json") {
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["card"], record.card.title, "{}", record.file);
        let row = json["rows"].as_array().unwrap().iter().find(|row| {
            row["model"] == model
                && row["weights"] == weights
                && row["batch"] == sequences
                && row["prompt_tokens"] == PROMPT_TOKENS
                && row["new_tokens"] == NEW_TOKENS
        });
        return row.unwrap()[field].as_f64().unwrap();
    }
    assert!(
        text.contains(&format!(
            "{}: {PROMPT_TOKENS} prompt tokens",
            record.card.title
        )),
        "{}",
        record.file
    );
    let start = [
        model.to_owned(),
        weights.into(),
        sequences.to_string(),
        NEW_TOKENS.to_string(),
    ];
    let cells = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|cells| cells.len() > cell && cells[..4] == start)
        .unwrap_or_else(|| panic!("{start:?} is not in {}", record.file));
    cells[cell].parse().unwrap()
}

/// Returns the time to the first token of one prompt in a file.
fn prompt_figure(record: &Record, tokens: usize) -> f64 {
    if !record.file.starts_with("prompts-") {
        assert_eq!(tokens, PROMPT_TOKENS);
        return decode_figure(record, 1, "ttft_ms", 4);
    }
    let json: Value = serde_json::from_str(&record_text(record.file)).unwrap();
    assert_eq!(json["card"], record.card.title, "{}", record.file);
    let row = json["rows"].as_array().unwrap().iter().find(|row| {
        row["model"] == model_name(record.model)
            && row["weights"] == weights_name(record.format)
            && row["prompts"] == 1
            && row["tokens"] == tokens
    });
    row.unwrap()["ttft_ms"].as_f64().unwrap()
}

#[test]
fn records_have_the_times_of_their_files() {
    for (records, is_decode) in [(DECODE, true), (PROMPTS, false)] {
        for record in records {
            assert!(record.milliseconds.is_sorted_by_key(|(number, _)| *number));
            for &(number, time) in record.milliseconds {
                let found = match is_decode {
                    true => decode_figure(record, number, "time_per_output_token_ms", 6),
                    false => prompt_figure(record, number),
                };
                assert!(
                    (found - time).abs() < 0.000_51,
                    "{record:?}: {time} at {number}, and the file has {found}"
                );
            }
        }
    }
}

#[test]
fn changes_of_perplexity_are_those_of_the_files() {
    for record in RECORDS {
        let files = record.source.files.iter();
        let files: Vec<Value> = files
            .map(|file| serde_json::from_str(&record_text(file)).unwrap())
            .collect();
        let models: Vec<&Value> = files
            .iter()
            .flat_map(|file| file["models"].as_array().unwrap())
            .collect();
        assert_eq!(record.changes.len(), record.source.models.len());
        for (name, change) in record.source.models.iter().zip(record.changes) {
            let model = models.iter().find(|model| model["name"] == *name).unwrap();
            let variants = model["variants"].as_array().unwrap();
            let variant = variants
                .iter()
                .find(|variant| variant["name"] == record.variant);
            let found = 100.0 * variant.unwrap()["change"].as_f64().unwrap();
            assert!(
                (found - change).abs() < 0.0051,
                "{name}, {}: {change}, and the file has {found}",
                record.variant
            );
        }
    }
    for format in Format::ALL {
        let has_source = note(format).contains("measured");
        assert_eq!(has_source, format != Format::F16, "{format:?}");
    }
}

#[test]
fn every_card_has_a_name_and_runs_all_formats() {
    let config = Model::Llama2Seven.config();
    for card in CARDS {
        assert_eq!(card.name.parse::<CardSpec>(), Ok(card));
        assert_eq!(card.name.to_uppercase().parse::<CardSpec>(), Ok(card));
        assert_eq!(CardSpec::of_title(card.title), Ok(card));
        for format in Format::ALL {
            // Tensor cores multiply FP8 from compute capability 8.9 on.
            let takes = format != Format::Fp8W8A8 || card.target().capability() >= 89;
            assert_eq!(
                format.runs(&config, &card.target()),
                takes,
                "{format:?} on {card:?}"
            );
        }
    }
    let error = "gtx-1080".parse::<CardSpec>().unwrap_err().to_string();
    for card in CARDS {
        assert!(error.contains(card.name), "{error}");
    }
}

#[test]
fn formats_that_the_kernels_do_not_take_are_left_out() {
    // 2:4 weights need a K that is a multiple of 4.
    let mut config = Model::Shipped.config();
    config.intermediate_size = 770;
    assert!(Format::Int4.runs(&config, &H200.target()));
    assert!(!Format::Int4TwoFour.runs(&config, &H200.target()));
    assert!(!Format::Int8TwoFour.runs(&config, &H200.target()));
    // Activations are rounded in chunks of 128 rows of K, and those of experts are not.
    config.intermediate_size = 768;
    config.hidden_size = 320;
    assert!(Format::Fp8.runs(&config, &H200.target()));
    assert!(Format::Fp8W8A8.fp8_products(&config, &H200.target(), 1024) < 1.0);
    let mixture = Model::Qwen3Thirty.config();
    assert!(Format::Fp8.runs(&mixture, &H200.target()));
    assert!(!Format::Fp8W8A8.runs(&mixture, &H200.target()));
    assert!(!Format::Int4.runs(&config, &marlin_kernels::Target::FLEX));
    assert!(Format::F16.runs(&config, &marlin_kernels::Target::FLEX));
}

/// Returns the relative error of the modelled time of a decode step, from other models' records
/// alone.
fn decode_error(record: &Record, sequences: usize, measured: f64) -> f64 {
    let others: Vec<Model> = REFERENCES
        .into_iter()
        .filter(|model| *model != record.model)
        .collect();
    let modelled = cost::model_decode(
        &record.model.config(),
        record.format,
        &record.card,
        sequences,
        PROMPT_TOKENS,
        &others,
    );
    assert_eq!(modelled.basis, Basis::Modelled);
    assert!(modelled.floor_milliseconds < modelled.milliseconds);
    assert!(modelled.floor_milliseconds < measured, "{record:?}");
    modelled.milliseconds / measured - 1.0
}

#[test]
fn steps_that_are_modelled_from_other_models_are_near_the_measured_ones() {
    // There is one mixture alone.
    let dense = DECODE
        .iter()
        .filter(|record| record.model.config().experts.is_none());
    for record in dense {
        for &(sequences, measured) in record.milliseconds {
            let error = decode_error(record, sequences, measured);
            println!(
                "decode {} {:?} {:?} {sequences}: {measured} ms, {:+.1} %",
                record.card.name,
                record.model,
                record.format,
                100.0 * error
            );
            let limit = match (record.model, record.format) {
                (Model::Llama2Seven | Model::Llama3Eight, Format::Int4) => 0.15,
                (Model::Llama2Seven | Model::Llama3Eight, _) => 0.35,
                (Model::Llama2Seventy, _) => 0.46,
                (Model::Shipped | Model::Qwen3Thirty, _) => 0.3,
            };
            assert!(error.abs() < limit, "{record:?}, {sequences}: {error}");
        }
    }
}

#[test]
fn steps_that_are_modelled_from_their_own_record_have_its_times() {
    for record in DECODE.iter().filter(|record| record.milliseconds.len() > 1) {
        if !REFERENCES.contains(&record.model) {
            continue;
        }
        for &(sequences, measured) in record.milliseconds {
            let (config, card) = (record.model.config(), &record.card);
            let modelled = cost::model_decode(
                &config,
                record.format,
                card,
                sequences,
                PROMPT_TOKENS,
                &[record.model],
            );
            assert!(
                (modelled.milliseconds - measured).abs() < 1e-9,
                "{record:?}"
            );
        }
    }
}

#[test]
fn modelled_prompts_are_near_the_measured_ones() {
    for record in PROMPTS {
        for &(tokens, measured) in record.milliseconds {
            let config = record.model.config();
            let modelled = cost::model_first_token(&config, record.format, &record.card, tokens);
            let error = modelled.milliseconds / measured - 1.0;
            println!(
                "prompt {} {:?} {:?} {tokens}: {measured} ms, {:+.1} %",
                record.card.name,
                record.model,
                record.format,
                100.0 * error
            );
            assert!(modelled.floor_milliseconds < measured, "{record:?}");
            assert!(error.abs() < 0.5, "{record:?}, {tokens}: {error}");
        }
    }
}

#[test]
fn an_h100_is_predicted_from_an_h200() {
    // The efficiencies of a card that is described as an H200 are those of the H200.
    let mut described = H100;
    described.name = H200.name;
    for record in DECODE.iter().filter(|record| record.card == H100) {
        for &(sequences, measured) in record.milliseconds {
            let modelled = cost::model_decode(
                &record.model.config(),
                record.format,
                &described,
                sequences,
                PROMPT_TOKENS,
                &REFERENCES,
            );
            let error = modelled.milliseconds / measured - 1.0;
            println!(
                "h100 from h200 {:?} {:?} {sequences}: {measured} ms, {:+.1} %",
                record.model,
                record.format,
                100.0 * error
            );
            assert!(error.abs() < 0.46, "{record:?}, {sequences}: {error}");
        }
    }
}

#[test]
fn measured_figures_are_of_the_measured_case_alone() {
    let seven = Model::Llama2Seven.config();
    let basis = |card, format, sequences, prompt| {
        cost::decode(&seven, format, card, sequences, prompt).basis
    };
    assert_eq!(basis(&H200, Format::Int4, 64, 64), Basis::Measured);
    assert_eq!(basis(&H100, Format::Int4, 64, 64), Basis::Measured);
    assert_eq!(basis(&H200, Format::Int4, 64, 65), Basis::Modelled);
    assert_eq!(basis(&H200, Format::Int4, 63, 64), Basis::Modelled);
    assert_eq!(basis(&H200, Format::Int4G32, 1, 64), Basis::Modelled);
    assert_eq!(basis(&CARDS[0], Format::Int4, 1, 64), Basis::Modelled);
    let mut other = seven.clone();
    other.num_hidden_layers += 1;
    let other = cost::decode(&other, Format::Int4, &H200, 1, 64);
    assert_eq!(other.basis, Basis::Modelled);
    assert_eq!(other.records, ["decode-models-h200.log"]);
    for tokens in [64, 512, 1024, 4000] {
        let first = cost::first_token(&seven, Format::Int4, &H200, tokens);
        assert_eq!(
            (first.basis, first.records),
            (Basis::Measured, vec!["prompts-h200.json"])
        );
    }
}

#[test]
fn activations_in_fp8_count_for_prompts_alone() {
    let eight = Model::Llama3Eight.config();
    for sequences in [1, 64] {
        let [fp8, rounded] = [Format::Fp8, Format::Fp8W8A8]
            .map(|format| cost::decode(&eight, format, &H200, sequences, PROMPT_TOKENS));
        assert_eq!(fp8, rounded, "{sequences}");
    }
    let first = |format, tokens| cost::first_token(&eight, format, &H200, tokens);
    assert_eq!(first(Format::Fp8W8A8, 16), first(Format::Fp8, 16));
    let [fp8, rounded] = [Format::Fp8, Format::Fp8W8A8].map(|format| first(format, 4000));
    assert_eq!(rounded.basis, Basis::Modelled);
    assert_eq!(
        rounded.records,
        ["prompts-h200.json", "prompts-w8a8-llama-2-7b-h200.json"]
    );
    assert!(
        rounded.milliseconds < 0.95 * fp8.milliseconds,
        "{rounded:?}"
    );
    assert!(rounded.floor_milliseconds < fp8.floor_milliseconds);
    // The measured prompt.
    let seven = Model::Llama2Seven.config();
    let measured = cost::first_token(&seven, Format::Fp8W8A8, &H200, 4000);
    assert_eq!(
        (measured.basis, measured.milliseconds),
        (Basis::Measured, 80.677)
    );
}

#[test]
fn mixtures_are_modelled_from_the_measured_mixture() {
    let measured = Model::Qwen3Thirty.config();
    let step = |config, card, format| cost::decode(config, format, card, 16, PROMPT_TOKENS);
    assert_eq!(step(&measured, &H200, Format::Int4).basis, Basis::Measured);
    let mut other = measured.clone();
    other.num_hidden_layers /= 2;
    for (config, card, format) in [
        (&other, &H200, Format::Int4),
        (&other, &H200, Format::F16),
        (&measured, &H100, Format::Int4),
        (&measured, &H100, Format::Nvfp4),
    ] {
        let step = step(config, card, format);
        assert_eq!(step.basis, Basis::Modelled, "{card:?}, {format:?}");
        assert_eq!(step.records, ["decode-qwen3-30b-a3b-h200.json"]);
        let first = cost::first_token(config, format, card, 1024);
        assert_eq!(first.records, ["prompts-qwen3-30b-a3b-h200.json"]);
        assert!(first.floor_milliseconds < first.milliseconds);
    }
    // A dense model is not modelled from a mixture.
    let dense = step(&Model::Llama3Eight.config(), &H100, Format::F16);
    assert!(!dense.records.iter().any(|file| file.contains("qwen3")));
}

#[test]
fn a_window_shortens_attention() {
    let full = Model::Llama3Eight.config();
    let mut windowed = full.clone();
    windowed.sliding_window = Some(marlin_lm::SlidingWindow {
        size: 1024,
        layers: marlin_lm::WindowLayers::From(0),
    });
    let step =
        |config, prompt| cost::decode(config, Format::Int4, &H200, 64, prompt).floor_milliseconds;
    assert_eq!(step(&full, 512), step(&windowed, 512));
    assert!(step(&windowed, 4096) < 0.9 * step(&full, 4096));
    let prompt =
        |config, tokens| cost::first_token(config, Format::Int4, &H200, tokens).floor_milliseconds;
    assert_eq!(prompt(&full, 1024), prompt(&windowed, 1024));
    assert!(prompt(&windowed, 8192) < prompt(&full, 8192));
}

#[test]
fn the_page_about_servers_says_what_fits() {
    let names = ["rtx-4090", "l40s", "a100-80gb", "h200"];
    let cards = names.map(|name| name.parse::<CardSpec>().unwrap());
    let titles = cards.map(|card| format!(" {} |", card.title.trim_start_matches("NVIDIA ")));
    let mut table = format!(
        "| int4, groups of 128 | weights | a position |{}\n|---|---:|---:|---:|---:|---:|---:|\n",
        titles.concat()
    );
    for (title, model) in [
        ("Llama 2 7B", Model::Llama2Seven),
        ("Llama 3 8B", Model::Llama3Eight),
        ("Llama 2 70B", Model::Llama2Seventy),
    ] {
        let config = model.config();
        let weights = Format::Int4.sizes(&config).bytes();
        let position = KvCache::size_bytes(&config, 1, 1, DTYPE);
        let cells = cards.map(|card| {
            let free = card.memory_bytes().saturating_sub(weights);
            match (0.9 * free as f64) as usize / position / 1000 {
                0 => " – |".into(),
                thousands => format!(" {thousands},000 |"),
            }
        });
        let (weights, position) = (weights as f64 / 1e9, position >> 10);
        table += &format!(
            "| {title} | {weights:.1} GB | {position} KiB |{}\n",
            cells.concat()
        );
    }
    expect_page("serve.md", |page| {
        let start = page.find("| int4, groups of 128 |").unwrap();
        let end = start + page[start..].find("\n\n").unwrap() + 1;
        [&page[..start], &table, &page[end..]].concat()
    });
}
