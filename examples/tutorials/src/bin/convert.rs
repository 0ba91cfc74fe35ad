//! Converts a Burn model to 4-bit weights, and prints the memory that it takes.

use std::error::Error;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::{GroupSize, QuantSpec, WeightQuantizer};

fn main() -> Result<(), Box<dyn Error>> {
    // Once, before the first tensor.
    burn_marlin::install()?;
    let device = Device::flex();

    // Any Burn model; nothing in it knows of 4 bits.
    let config = TransformerEncoderConfig::new(1024, 4096, 16, 4).with_dropout(0.0);
    let model: TransformerEncoder = config.init(&device);
    let x = Tensor::<3>::random([1, 16, 1024], Distribution::Default, &device);
    let before = model.forward(TransformerEncoderInput::new(x.clone()));
    println!("f32: the process takes {}", memory());
    model.clone().into_record().save("f32.bpk")?;

    let quantizer = WeightQuantizer::new(QuantSpec::int4(GroupSize::G128));
    let (model, report) = quantizer.quantize(model)?;
    println!("{report}");

    let after = model.forward(TransformerEncoderInput::new(x));
    println!("int4: the process takes {}", memory());
    model.into_record().save("int4.bpk")?;

    let norm = |x: Tensor<3>| x.square().sum().sqrt().into_scalar::<f32>();
    let error = norm(after - before.clone()) / norm(before);
    println!("relative error of the output: {error:.3}");
    Ok(())
}

/// Returns the resident memory of this process, as Linux reports it.
fn memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.map_or("an unknown amount".into(), |size| size.trim().into())
}
