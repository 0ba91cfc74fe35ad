use crate::device::{scale_dtype, target};
use crate::ops::{W4A16Backend, W4A16Weight, activation_dtype};
use crate::{Error, fusion};
use burn::backend::Dispatch;
use burn::module::{Content, Module, ModuleDisplay, Param, ParamId, Reparameterization};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use marlin_format::layout::PlainLayout;
use marlin_format::{PlainParts, PlainWeight, QuantSpec, Scales, quantize_rtn};
use marlin_kernels::{ActivationDtype, Plan, Problem, select};

/// A 4-bit weight [K, N] on a device: the quantised tensor type.
///
/// It is a Burn [`Module`]: its tensors take part in records, devices and `Display`, and none of them ever gets a gradient. A record holds the
/// plain form, so that it opens on any device.
///
/// | tensor | dtype, shape |
/// |---|---|
/// | words | i32 [K/8 up, N up to a multiple of 8], eight rows of K a word ([`PlainLayout`]) |
/// | scales | [G, N] in the format's dtype, or f32 where the device lacks it |
/// | zero points | i32 [G, N/8 up], eight a word along N; absent where symmetric |
/// | row permutation | i32 `[K]`, act-order; absent where rows are in order |
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct QuantizedWeight {
    words: Param<Tensor<2, Int>>,
    scales: Param<Tensor<2>>,
    zero_points: Option<Param<Tensor<2, Int>>>,
    row_permutation: Option<Param<Tensor<1, Int>>>,
    #[module(skip)]
    k: usize,
    #[module(skip)]
    n: usize,
    #[module(skip)]
    spec: QuantSpec,
}

impl QuantizedWeight {
    /// Puts a weight on a device.
    pub fn from_plain(plain: &PlainWeight, device: &Device) -> Self {
        let (k, n, spec) = (plain.k(), plain.n(), plain.spec());
        let layout = PlainLayout::new(k, n);
        let groups = spec.group.count(k);
        let int = |values: Vec<i32>, shape: [usize; 2]| {
            Param::initialized(ParamId::new(), Tensor::from_data(TensorData::new(values, shape), (device, DType::I32)))
        };
        let words = int(plain.words().iter().map(|&word| word as i32).collect(), [layout.rows(), layout.columns()]);
        let scales = match plain.scales() {
            Scales::F16(values) => TensorData::new(values.clone(), [groups, n]),
            Scales::BF16(values) => TensorData::new(values.clone(), [groups, n]),
        };
        let scales = Tensor::from_data(scales, (device, scale_dtype(spec.scale_dtype, device)));
        let zero_points = plain.zero_points().map(|values| {
            let words = values.chunks(n).flat_map(|row| row.chunks(8).map(pack_zero_points)).collect();
            int(words, [groups, layout.columns() / 8])
        });
        let row_permutation = plain.row_permutation().map(|rows| {
            let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
            Param::initialized(ParamId::new(), Tensor::from_data(TensorData::new(rows, [k]), (device, DType::I32)))
        });
        Self { words, scales: Param::initialized(ParamId::new(), scales), zero_points, row_permutation, k, n, spec }
    }

    /// Rounds a float weight [K, N] to the nearest 4-bit values, on the host, and puts it on the weight's device.
    ///
    /// # Errors
    /// A group that does not divide K, or values that are not finite.
    pub fn quantize(weight: Tensor<2>, spec: &QuantSpec) -> Result<Self, Error> {
        let device = weight.device();
        let [k, n] = weight.dims();
        let values = read::<f32>("weight", weight.try_into_data().map_err(|error| read_error("weight", &error))?.convert::<f32>())?;
        Ok(Self::from_plain(&quantize_rtn(&values, k, n, spec)?, &device))
    }

    /// Reads the weight back to the host.
    ///
    /// # Errors
    /// The device fails, or a record was loaded that does not belong to this weight.
    pub fn to_plain(&self) -> Result<PlainWeight, Error> {
        let words = self.words.val().try_into_data().map_err(|error| read_error("words", &error))?;
        let scales = self.scales.val().try_into_data().map_err(|error| read_error("scales", &error))?;
        let scales = Scales::from_f32(&read::<f32>("scales", scales.convert::<f32>())?, self.spec.scale_dtype);
        let zero_points = match &self.zero_points {
            Some(zeros) => {
                let words = zeros.val().try_into_data().map_err(|error| read_error("zero points", &error))?;
                Some(unpack_zero_points(&read::<i32>("zero points", words)?, self.n))
            }
            None => None,
        };
        let row_permutation = match &self.row_permutation {
            Some(rows) => {
                let rows = rows.val().try_into_data().map_err(|error| read_error("row permutation", &error))?;
                Some(read::<i32>("row permutation", rows)?.into_iter().map(|row| row as u32).collect())
            }
            None => None,
        };
        Ok(PlainWeight::new(PlainParts {
            k: self.k,
            n: self.n,
            spec: self.spec,
            words: read::<i32>("words", words)?.into_iter().map(|word| word as u32).collect(),
            scales,
            zero_points,
            row_permutation,
        })?)
    }

    /// The float weight [K, N] in natural row order.
    pub fn dequantize(&self, dtype: FloatDType) -> Tensor<2> {
        self.dequantize_as(dtype)
    }

    fn dequantize_as<const D: usize>(&self, dtype: FloatDType) -> Tensor<D> {
        Tensor::from_dispatch(Dispatch::w4a16_dequantize(self.to_op(), dtype))
    }

    /// Activations [.., K] times this weight: [.., N], in the activations' dtype, accumulated in f32.
    ///
    /// f32, f16 and bf16 reach the kernels; any other float dtype is computed in f32.
    ///
    /// # Panics
    /// Where the last dimension of `x` is not K, as Burn's own layers do.
    pub fn matmul<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.matmul_bias(x, None)
    }

    /// As [`matmul`](Self::matmul), with a bias `[N]` in the activations' dtype added before the output is rounded.
    pub(crate) fn matmul_bias<const D: usize>(&self, x: Tensor<D>, bias: Option<Tensor<1>>) -> Tensor<D> {
        let found = x.dims().last().copied().unwrap_or(0);
        assert!(found == self.k, "W4A16: activations have {found} features in their last dimension, the weight has K = {}", self.k);
        let dtype = x.dtype();
        if activation_dtype(dtype).is_none() {
            let bias = bias.map(|bias| bias.cast(FloatDType::F32));
            return self.matmul_bias(x.cast(FloatDType::F32), bias).cast(FloatDType::from(dtype));
        }
        Tensor::from_dispatch(Dispatch::w4a16_linear(x.into_dispatch(), self.to_op(), bias.map(Tensor::into_dispatch).into()))
    }

    /// [K, N]: input and output features.
    pub fn dims(&self) -> [usize; 2] {
        [self.k, self.n]
    }

    /// How the weight is quantised.
    pub fn spec(&self) -> QuantSpec {
        self.spec
    }

    /// Whether rows are permuted (act-order).
    pub fn is_permuted(&self) -> bool {
        self.row_permutation.is_some()
    }

    /// The device that holds the weight.
    pub fn device(&self) -> Device {
        self.words.lazy_device()
    }

    /// Bytes on the device, padding included.
    pub fn size_bytes(&self) -> usize {
        let ints = self.words.shape().num_elements()
            + self.zero_points.as_ref().map_or(0, |zeros| zeros.shape().num_elements())
            + self.row_permutation.as_ref().map_or(0, |rows| rows.shape().num_elements());
        4 * ints + self.scales.shape().num_elements() * self.scales.dtype().size()
    }

    /// The problem of multiplying `m` rows of activations with this weight.
    pub fn problem(&self, m: usize, activations: ActivationDtype) -> Problem {
        let scales = activation_dtype(self.scales.dtype()).unwrap_or(ActivationDtype::F32);
        Problem { m, n: self.n, k: self.k, spec: self.spec, activations, scales, permuted: self.is_permuted() }
    }

    /// The kernel that runs `m` rows of activations on this weight's device, and why.
    pub fn plan(&self, m: usize, activations: ActivationDtype) -> Plan {
        select(&self.problem(m, activations), &target(&self.device()))
    }

    fn to_op(&self) -> W4A16Weight<Dispatch> {
        W4A16Weight {
            words: self.words.val().into_dispatch(),
            scales: self.scales.val().into_dispatch(),
            zero_points: self.zero_points.as_ref().map(|zeros| zeros.val().into_dispatch()).into(),
            row_permutation: self.row_permutation.as_ref().map(|rows| rows.val().into_dispatch()).into(),
            k: self.k,
            n: self.n,
            spec: self.spec,
        }
    }
}

impl ModuleDisplay for QuantizedWeight {
    fn custom_content(&self, content: Content) -> Option<Content> {
        content.add("k", &self.k).add("n", &self.n).add("format", &self.spec.to_string()).optional()
    }
}

/// Attached to the weight of an ordinary `Linear`, it makes that layer a W4A16 layer: see [`W4A16`](crate::W4A16).
impl Reparameterization for QuantizedWeight {
    const NAME: &'static str = "w4a16";

    /// The lazy float weight. Where the fusion provider is installed, the matmul that reads it takes the packed weight in its place and the
    /// float weight never exists.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        fusion::start_block(&self.scales.val());
        let dtype = if activation_dtype(base.dtype()).is_some() { FloatDType::from(base.dtype()) } else { FloatDType::F32 };
        self.dequantize_as(dtype)
    }
}

fn read_error(tensor: &'static str, error: &dyn std::fmt::Debug) -> Error {
    Error::Read { tensor, reason: format!("{error:?}") }
}

fn read<E: burn::tensor::Element>(tensor: &'static str, data: TensorData) -> Result<Vec<E>, Error> {
    let found = data.dtype();
    data.try_into_vec::<E>().map_err(|_| Error::Dtype { tensor, expected: E::dtype().name(), found })
}

/// Up to eight zero points to one word, the first in the lowest bits.
fn pack_zero_points(zeros: &[u8]) -> i32 {
    zeros.iter().enumerate().fold(0u32, |word, (i, &zero)| word | (u32::from(zero & 15) << (4 * i))) as i32
}

/// The zero points [G, N] in words [G, N/8 up].
fn unpack_zero_points(words: &[i32], n: usize) -> Vec<u8> {
    let row = |words: &[i32]| (0..n).map(|column| (words[column / 8] as u32 >> (4 * (column % 8)) & 15) as u8).collect::<Vec<_>>();
    words.chunks_exact(n.div_ceil(8)).flat_map(row).collect()
}
