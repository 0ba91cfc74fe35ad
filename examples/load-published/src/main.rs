//! Loads a BERT that llm-compressor, GPTQModel or AutoAWQ quantised, and classifies token ids.

use std::path::PathBuf;

use burn::tensor::{Device, Int, Tensor};
use burn_marlin::WeightQuantizer;
use clap::Parser;
use load_published::{Bert, BertConfig};

/// Loads a published BERT classifier and prints the logit of each class.
#[derive(Debug, Parser)]
struct Args {
    /// Hugging Face folder of a `BertForSequenceClassification`, quantised or not.
    #[arg(default_value = "tests/golden/bert-ct-int4-g32")]
    dir: PathBuf,
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = [52, 69, 34, 20, 31])]
    ids: Vec<i64>,
    /// A new folder to export the model to, as compressed-tensors.
    #[arg(long)]
    export: Option<PathBuf>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    burn_marlin::install()?;
    let device = Device::default();
    let config: BertConfig = serde_json::from_slice(&std::fs::read(args.dir.join("config.json"))?)?;

    let (model, report) =
        WeightQuantizer::load(config.init(&device), &args.dir, &Bert::from_transformers()?)?;
    println!("{report}");

    let ids = Tensor::<1, Int>::from_data(args.ids.as_slice(), &device).unsqueeze::<2>();
    let segments = ids.zeros_like();
    let logits = model
        .classify(model.encode(ids, segments))
        .try_into_vec_as::<f32>()?;
    for (label, logit) in config.id2label.values().zip(logits) {
        println!("{label}: {logit:.4}");
    }
    if let Some(dir) = &args.export {
        WeightQuantizer::export(&model, dir, &Bert::to_transformers()?)?;
    }
    Ok(())
}
