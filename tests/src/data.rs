use half::{bf16, f16};
use marlin_format::layout::{MetadataLayout, PlainLayout};
use marlin_format::{
    FormatError, PlainParts, PlainWeight, QuantSpec, Scales, Sparsity, WeightDescriptor,
    WeightFormat, WeightTensors, WeightValue,
};
use marlin_kernels::{ActivationDtype, Epilogue, QuantProblem};
use marlin_testing::random_values;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use std::fmt;
use std::sync::OnceLock;

/// One matmul to test.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The number of rows of activations.
    pub m: usize,
    /// The number of input features.
    pub k: usize,
    /// The number of output features.
    pub n: usize,
    /// The format of the weight.
    pub spec: QuantSpec,
    /// The dtype of activations and output.
    pub activations: ActivationDtype,
    /// True if the weight has act-order.
    pub permuted: bool,
    /// The sparsity of the weight.
    pub sparsity: Sparsity,
}

impl Case {
    /// Returns the problem for the kernels, with scales in the dtype of the format.
    pub fn problem(&self) -> QuantProblem {
        let Self {
            m,
            k,
            n,
            spec,
            activations,
            permuted,
            sparsity,
        } = *self;
        let format = WeightFormat::dense(spec)
            .with_permutation(permuted)
            .with_sparsity(sparsity);
        QuantProblem::new(m, WeightDescriptor::plain(format, k, n), activations)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem().fmt(f)
    }
}

/// Random operands of a case, and their product in f64.
#[derive(Debug)]
pub struct Operands {
    /// The activations [M, K], each value exact in their dtype.
    pub x: Vec<f32>,
    /// The weight, with random values, scales and zero points.
    pub weight: PlainWeight,
    /// The bias `[N]`, each value exact in the activations' dtype.
    pub bias: Vec<f32>,
    /// The expected output x W + bias, [M, N].
    pub expected: Vec<f64>,
    /// The square root of the sum of squares of the terms of each output: the expected magnitude of
    /// a random sum of these terms.
    pub magnitude: Vec<f64>,
    tiles: OnceLock<WeightTensors<Vec<u8>>>,
}

impl Operands {
    /// Returns the bytes of the weight's tensors in the tile layout, packed at the first call.
    pub fn tiles(&self) -> &WeightTensors<Vec<u8>> {
        self.tiles.get_or_init(|| {
            tile_bytes(&self.weight)
                .unwrap_or_else(|error| panic!("{}: {error}", self.weight.descriptor()))
        })
    }

    /// Draws the operands of a case from a seed.
    pub fn random(case: &Case, seed: u64) -> Self {
        let Case {
            m,
            k,
            n,
            spec,
            activations,
            permuted,
            sparsity,
        } = *case;
        let mut rng = StdRng::seed_from_u64(seed);
        let round = |value| round(value, activations);
        let groups = spec.scales.group.count(k);
        let max = spec.value.max();
        let mut code = || {
            let code = rng.random_range(0..=max);
            // NaN is no weight.
            if spec.value.is_nan(code) {
                code - 1
            } else {
                code
            }
        };
        let q: Vec<u8> = (0..k * n).map(|_| code()).collect();
        let layout = PlainLayout::new(sparsity.stored_rows(k), n, spec.value);
        let qweight = layout.pack_with(|row, column| q[row * n + column]);
        let metadata = (sparsity == Sparsity::TwoFour).then(|| random_metadata(&mut rng, k, n));
        let scales: Vec<f32> = (0..groups * n)
            .map(|_| rng.random_range(0.002..0.02))
            .collect();
        let zero_points = spec
            .has_zero_points()
            .then(|| (0..groups * n).map(|_| rng.random_range(0..=max)).collect());
        let row_permutation = permuted.then(|| {
            let mut rows: Vec<u32> = (0..k as u32).collect();
            rows.shuffle(&mut rng);
            rows
        });
        let scales = Scales::from_f32(&scales, spec.scales.dtype);
        let parts = PlainParts {
            k,
            n,
            spec,
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        };
        let weight = PlainWeight::new(parts).unwrap_or_else(|error| panic!("{case}: {error}"));
        let [x, bias] = [m * k, n].map(|count| {
            let values = random_values(count, 1.0, &mut rng);
            values.into_iter().map(round).collect::<Vec<f32>>()
        });
        let (expected, magnitude) = reference(&x, &weight, &bias, m);
        Self {
            x,
            weight,
            bias,
            expected,
            magnitude,
            tiles: OnceLock::new(),
        }
    }

    /// Returns a gated epilogue of the product, whose first half of columns are gates: the expected
    /// outputs [M, N / 2], and the magnitude of the terms of each output, to first order.
    pub fn gated(&self, case: &Case, epilogue: Epilogue) -> (Vec<f64>, Vec<f64>) {
        let half = case.n / 2;
        let rows = self
            .expected
            .chunks_exact(case.n)
            .zip(self.magnitude.chunks_exact(case.n));
        let outputs = rows.flat_map(|(sums, magnitudes)| {
            let ((gates, ups), (of_gates, of_ups)) =
                (sums.split_at(half), magnitudes.split_at(half));
            (0..half).map(move |i| {
                let (output, [of_gate, of_up]) = gated(epilogue, gates[i], ups[i]);
                (output, (of_up * of_ups[i]).hypot(of_gate * of_gates[i]))
            })
        });
        outputs.unzip()
    }

    /// Computes the product again after a change of `x`.
    pub fn recompute(&mut self, case: &Case) {
        (self.expected, self.magnitude) = reference(&self.x, &self.weight, &self.bias, case.m);
    }
}

/// Returns the output of a gate and an up, and its derivatives with respect to both.
pub fn gated(epilogue: Epilogue, gate: f64, up: f64) -> (f64, [f64; 2]) {
    let limit = match epilogue {
        Epilogue::ClampedSwiGlu => f64::from(Epilogue::CLAMPED_LIMIT),
        _ => f64::INFINITY,
    };
    let (factor, shift) = match epilogue {
        Epilogue::ClampedSwiGlu => (f64::from(Epilogue::CLAMPED_SLOPE), 1.0),
        _ => (1.0, 0.0),
    };
    let inside = |is_inside| if is_inside { 1.0 } else { 0.0 };
    let of_gate = inside(gate <= limit);
    let of_up = inside(up.abs() <= limit);
    let (gate, up) = (gate.min(limit), up.clamp(-limit, limit) + shift);
    let sigmoid = 1.0 / (1.0 + (-factor * gate).exp());
    let slope = sigmoid * (1.0 + factor * gate * (1.0 - sigmoid));
    (
        gate * sigmoid * up,
        [of_gate * slope * up, of_up * gate * sigmoid],
    )
}

/// Rounds a value to a dtype.
pub fn round(value: f32, dtype: ActivationDtype) -> f32 {
    match dtype {
        ActivationDtype::F32 => value,
        ActivationDtype::F16 => f16::from_f32(value).to_f32(),
        ActivationDtype::BF16 => bf16::from_f32(value).to_f32(),
    }
}

/// Returns the bytes of a weight's tensors in the plain layout, as a device holds them.
pub fn plain_bytes(weight: &PlainWeight) -> WeightTensors<Vec<u8>> {
    WeightTensors {
        qweight: little_endian(weight.qweight()),
        metadata: weight.metadata().map(little_endian),
        scales: weight.scales().as_bytes().to_vec(),
        zero_points: weight.zero_point_words().map(|words| little_endian(&words)),
        row_permutation: weight.row_permutation().map(little_endian),
    }
}

/// Returns the bytes of a weight's tensors in the tile layout.
fn tile_bytes(weight: &PlainWeight) -> Result<WeightTensors<Vec<u8>>, FormatError> {
    let descriptor = weight.descriptor();
    let metadata = weight
        .metadata()
        .map(|metadata| descriptor.sparse_layout().pack_metadata(metadata));
    let zero_points = weight
        .zero_points()
        .map(|zeros| descriptor.tile_zeros().pack(zeros));
    Ok(WeightTensors {
        qweight: little_endian(&descriptor.tiles().pack(weight)?),
        metadata: metadata.transpose()?.map(|words| little_endian(&words)),
        scales: descriptor
            .tile_scales()
            .pack(weight.scales())?
            .as_bytes()
            .to_vec(),
        zero_points: zero_points.transpose()?.map(|words| little_endian(&words)),
        row_permutation: weight.row_permutation().map(little_endian),
    })
}

fn little_endian(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the row of a stored value, in the order of groups.
fn row_of(weight: &PlainWeight, stored: usize, column: usize) -> usize {
    let Some(metadata) = weight.metadata() else {
        return stored;
    };
    let nibble = MetadataLayout::new(weight.k(), weight.n())
        .index(stored / 2, column)
        .read(metadata);
    let place = if stored.is_multiple_of(2) {
        nibble & 3
    } else {
        nibble >> 2
    };
    stored / 2 * 4 + usize::from(place)
}

/// Draws the metadata of a 2:4 weight: the places of the stored values.
fn random_metadata(rng: &mut StdRng, k: usize, n: usize) -> Vec<u32> {
    let layout = MetadataLayout::new(k, n);
    let mut metadata = vec![MetadataLayout::PADDING_WORD; layout.words()];
    let mut nibble = || MetadataLayout::NIBBLES[rng.random_range(0..MetadataLayout::NIBBLES.len())];
    for four in 0..k / 4 {
        (0..n).for_each(|column| layout.index(four, column).write(&mut metadata, nibble()));
    }
    metadata
}

/// Returns the number of a code: an integer, or the float whose bits are a sign, an exponent and a
/// mantissa (OCP Microscaling Formats 1.0, section 5.3; OCP 8-bit Floating Point 1.0, section 5.2).
fn number(value: WeightValue, code: u8) -> f64 {
    let (exponent_bits, mantissa_bits, bias) = match value {
        WeightValue::Int4 | WeightValue::Int8 => return f64::from(code),
        WeightValue::E2m1 => (2, 1, 1),
        WeightValue::E4m3 => (4, 3, 7),
    };
    let exponent = i32::from(code >> mantissa_bits & ((1 << exponent_bits) - 1));
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    if code >> (exponent_bits + mantissa_bits) == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// Computes x W + bias in f64 and the magnitudes from the definition of the format, without the
/// code under test.
fn reference(x: &[f32], weight: &PlainWeight, bias: &[f32], m: usize) -> (Vec<f64>, Vec<f64>) {
    let (k, n) = (weight.k(), weight.n());
    let rows = weight.spec().scales.group.rows(k);
    let mut dense = vec![0.0f64; k * n];
    for stored in 0..weight.sparsity().stored_rows(k) {
        for column in 0..n {
            let row = row_of(weight, stored, column);
            let natural = weight
                .row_permutation()
                .map_or(row, |rows| rows[row] as usize);
            let group = (row / rows) * n + column;
            let zero = weight
                .zero_points()
                .map_or(weight.spec().value.midpoint(), |zeros| zeros[group]);
            let code = weight.q(stored, column);
            let number = number(weight.spec().value, code) - f64::from(zero);
            dense[natural * n + column] = number * f64::from(weight.scales().get(group));
        }
    }
    let (mut out, mut magnitude) = (Vec::with_capacity(m * n), Vec::with_capacity(m * n));
    for row in x.chunks_exact(k) {
        let mut sums: Vec<f64> = bias.iter().copied().map(f64::from).collect();
        let mut squares: Vec<f64> = sums.iter().map(|bias| bias.powi(2)).collect();
        for (&x, weights) in row.iter().zip(dense.chunks_exact(n)) {
            for ((sum, square), weight) in sums.iter_mut().zip(&mut squares).zip(weights) {
                let term = f64::from(x) * weight;
                *sum += term;
                *square += term * term;
            }
        }
        out.extend(sums);
        magnitude.extend(squares.into_iter().map(f64::sqrt));
    }
    (out, magnitude)
}
