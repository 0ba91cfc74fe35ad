//! CubeCL devices that run quantisers, and the matmul that the quantisers use.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DispatchDevice, TensorMetadata, backend_extension};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_marlin::backend::cube::empty;
use cubecl::client::Client;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::routine::BlueprintStrategy;
use cubek::std::InputBinding;
use marlin_kernels::{Runtime, Target};

/// Returns the client of a CubeCL device that is not a CPU and has no autodiff. On CubeCL's CPU
/// runtime, matmuls are slower than the host's own code.
fn client(device: &Device) -> Option<Client> {
    match device.as_dispatch() {
        DispatchDevice::Cube(cube) if !device.is_autodiff() => {
            Some(cube.client()).filter(|client| Target::of(client).runtime != Runtime::Cpu)
        }
        _ => None,
    }
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
        let ([m, _], [_, n]) = (a.shape().dims(), b.shape().dims());
        let (client, out) = (a.client.clone(), empty(&a, Shape::new([m, n]), DType::F32));
        let elem = |tensor: &CubeTensor| dtype_to_storage_type(tensor.dtype);
        let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems {
            lhs: elem(&a),
            rhs: elem(&b),
            out: elem(&out),
        });
        let input = |tensor: &CubeTensor| InputBinding::new(tensor.clone().binding(), elem(tensor));
        let strategy = Strategy::SpecializedTmaMma(BlueprintStrategy::Inferred(().into()));
        match launch_ref(
            &strategy.into(),
            &client,
            input(&a),
            input(&b),
            out.clone().binding(),
            &mut dtypes,
        ) {
            Ok(()) => out,
            Err(error) => {
                tracing::debug!(?error, m, n, "Burn chooses another matmul");
                matmul(a, b, None, MatmulStrategy::Cube, DType::F32)
                    .unwrap_or_else(|error| panic!("matmul of {m} by {n}: {error:?}"))
            }
        }
    }
}
