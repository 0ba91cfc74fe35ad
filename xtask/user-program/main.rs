//! Times one row through a float `Linear` of Burn, the same layer converted to 4 bits, and a
//! `QuantLinear`, on the device Flex. Fails if the converted layer takes many times longer than the
//! float layer.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_marlin::{GroupSize, QuantLinear, QuantSpec, WeightQuantizer};
use std::error::Error;
use std::time::Instant;

/// The number of input and of output features.
const FEATURES: [usize; 2] = [768, 3072];
/// The number of timed calls of each layer.
const CALLS: usize = 60;
/// The largest time of the converted layer, in times of the float layer. Measured are 1.7 to 2.3 on
/// two cores of an AMD EPYC, with optimised dependencies and without (`benches/records/host-dev.log`).
/// Loops that are compiled in this crate took 16.
const MAX_RATIO: f64 = 5.0;

#[derive(Module, Debug)]
struct Model {
    layer: Linear,
}

fn main() -> Result<(), Box<dyn Error>> {
    burn_marlin::install()?;
    let (device, [k, n]) = (Device::flex(), FEATURES);
    let float = Model {
        layer: LinearConfig::new(k, n).init(&device),
    };
    let spec = QuantSpec::int4(GroupSize::G64);
    let own = QuantLinear::from_linear(&float.layer, &spec)?;
    let (converted, _) = WeightQuantizer::new(spec).quantize(float.clone())?;
    let x = Tensor::<2>::random([1, k], Distribution::Default, &device);
    let calls: [&dyn Fn() -> Tensor<2>; 3] = [
        &|| float.layer.forward(x.clone()),
        &|| converted.layer.forward(x.clone()),
        &|| own.forward(x.clone()),
    ];
    // The calls alternate, so that other load on the machine affects all of them.
    let mut times = [[0.0; CALLS]; 3];
    for call in 0..CALLS {
        for (times, forward) in times.iter_mut().zip(calls) {
            let clock = Instant::now();
            let y = forward();
            times[call] = clock.elapsed().as_secs_f64() * 1e6;
            assert_eq!(y.dims(), [1, n]);
        }
    }
    let [float, converted, own] = times.map(|mut times| {
        times.sort_unstable_by(f64::total_cmp);
        times[CALLS / 2]
    });
    let ratio = converted / float;
    println!(
        "Linear {k} x {n}, one row, {spec}, Flex, f32: float {float:.0} us, converted \
         {converted:.0} us ({ratio:.2}), QuantLinear {own:.0} us ({:.2})",
        own / float
    );
    if ratio > MAX_RATIO {
        return Err(format!(
            "the converted layer takes {ratio:.1} times as long as the float layer, of at most {MAX_RATIO}"
        )
        .into());
    }
    Ok(())
}
