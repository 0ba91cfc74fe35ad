//! The CubeCL devices that run quantisers, and the matmul that the quantisers use.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_marlin::backend::tma;
use burn_marlin::device;
use cubecl::client::Client;
use marlin_kernels::{Runtime, Target};

/// Returns the client of a CubeCL device that is not a CPU and has no autodiff. On CubeCL's CPU
/// runtime, matmuls are slower than the host's own code.
fn client(device: &Device) -> Option<Client> {
    device::client(device).filter(|client| Target::of(client).runtime != Runtime::Cpu)
}

/// Returns true if weights are rounded on the device.
pub(crate) fn rounds(device: &Device) -> bool {
    client(device).is_some()
}

/// Returns true for an NVIDIA card with tensor cores for bf16.
pub(crate) fn has_tensor_cores(device: &Device) -> bool {
    client(device).is_some_and(|client| Target::of(&client).runtime == Runtime::Cuda)
        && device.supports_dtype(DType::BF16)
}

/// A backend with a matmul of 16-bit factors whose result is in f32.
#[backend_extension(Cube, Fusion)]
pub trait ProductBackend: Backend {
    /// Multiplies `a` [M, K] with `b` [K, N], without autotuning: autotuning takes minutes on an
    /// H200 for the first product.
    #[fusion(meta = product_spec)]
    fn quant_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self>;
}

fn product_spec(a: &TensorSpec, b: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([a.shape[0], b.shape[1]]), DType::F32)
}

impl ProductBackend for CubeBackend {
    fn quant_product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        tma::matmul(&a, &b, DType::F32).unwrap_or_else(|| {
            let (left, right) = (a.shape(), b.shape());
            matmul(a, b, None, MatmulStrategy::Cube, DType::F32)
                .unwrap_or_else(|error| panic!("matmul of {left:?} by {right:?}: {error:?}"))
        })
    }
}
