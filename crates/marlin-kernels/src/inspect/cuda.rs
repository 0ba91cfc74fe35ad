//! Generates the CUDA text of a kernel without a device, in order to inspect the machine code that
//! the compiler generates from it.

use cubecl::define_kernel;
use cubecl::ir::features::{Plane, Tma, TypeUsage};
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, OpaqueType, VectorSize,
};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaCmmaCompiler;
use cubecl_cpp::cuda::supported_mma_combinations;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_wmma_features,
};
use cubecl_cpp::target::Cuda;
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::runtime::Runtime;
use std::sync::Arc;

/// The CUDA C++ text of a kernel.
#[derive(Debug, Clone)]
pub struct KernelSource {
    /// Name of the kernel in the text.
    pub entry: String,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: usize,
    /// The text.
    pub text: String,
}

/// Returns the CUDA text of any kernel, generated for a card with the given [`properties`].
///
/// # Errors
/// Returns the compilation error if CubeCL refuses the kernel.
pub fn cuda_text(
    kernel: &impl CubeKernel,
    capability: u32,
) -> Result<KernelSource, CompilationError> {
    let definition = define_kernel(kernel)?;
    let entry = definition.settings.kernel_name.clone();
    let compiled = CppCompiler::<Cuda>::default().compile(definition, &options(capability))?;
    Ok(KernelSource {
        entry,
        shared_bytes: compiled.shared_memory_size,
        text: compiled.source,
    })
}

/// Returns the settings of a kernel with blocks of `threads` threads and 32-bit element indices.
pub fn settings(threads: usize, mode: ExecutionMode) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_1d(threads as u32), mode, AddressType::U32)
}

/// Returns the target properties of CubeCL's CUDA runtime.
pub fn target() -> Arc<TargetProperties> {
    Arc::new(cubecl_cuda::CudaRuntime::target_properties())
}

/// Returns the compilation argument of a buffer that is not an alias of another buffer.
pub fn buffer() -> BufferCompilationArg {
    BufferCompilationArg { inplace: None }
}

/// Returns the compilation argument of an optional buffer.
pub fn optional<T: LaunchArg<CompilationArg = BufferCompilationArg>>(
    is_there: bool,
) -> ComptimeOptionCompilationArg<T> {
    if is_there {
        ComptimeOptionCompilationArg::Some(buffer())
    } else {
        ComptimeOptionCompilationArg::None
    }
}

/// Returns the maximum shared memory of a block, in bytes, on a card of compute capability
/// `capability`.
pub fn shared_limit(capability: u32) -> usize {
    1024 * match capability {
        80 | 87 => 163,
        86 | 89 | 120 | 121 => 99,
        90.. => 227,
        _ => 64,
    }
}

/// Returns the properties that CubeCL's CUDA runtime reports for a card of compute capability
/// `capability`, as far as these kernels query them.
pub fn properties(capability: u32) -> Arc<DeviceProperties> {
    let arch = CudaArchitecture {
        version: capability,
        tensor_cores: true,
    };
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared_limit(capability),
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: format!("sm_{capability}"),
        fingerprint: format!("ptx_sm{capability}"),
        physical: None,
    };
    let memory = MemoryDeviceProperties::new(1 << 34, 512);
    let mut properties = DeviceProperties::new(
        Default::default(),
        memory,
        hardware,
        TimingMethod::Device,
        identity,
    );
    register_supported_types(&mut properties);
    properties.register_opaque_type(OpaqueType::Barrier);
    if capability >= 90 {
        properties.features.tma.insert(Tma::Base);
        properties.register_opaque_type(OpaqueType::TensorMap);
    }
    properties.features.plane.insert(Plane::Sync);
    properties.features.plane.insert(Plane::Ops);
    properties
        .features
        .plane
        .insert(Plane::NonUniformControlFlow);
    for kind in [FloatKind::F16, FloatKind::BF16] {
        properties
            .features
            .matmul
            .ldmatrix
            .insert(ElemType::Float(kind));
    }
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    properties.features.copy_async = true;
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    properties.features.device_memory_scope = true;
    register_wmma_features(
        CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch),
        &mut properties,
    );
    register_mma_features(supported_mma_combinations(&arch), &mut properties);
    Arc::new(properties)
}

fn options(capability: u32) -> CompilationOptions {
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            fast_math: true,
            dp4a: true,
            grid_constants: true,
            fast_tanh: true,
            clusters: capability >= 90,
            elect_sync: capability >= 90,
        },
        amd_wmma: None,
    }
}
