use super::fuser::LinearFuser;
use super::operation::FusedLinear;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{CubeFuser, OptimizationProvider, register as register_provider};

/// Registers the provider, or returns the reason why it is too late to register one.
pub(super) fn register() -> Result<(), String> {
    register_provider(Provider).map_err(|error| error.to_string())
}

struct Provider;

impl OptimizationProvider for Provider {
    type Operation = FusedLinear;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(LinearFuser::default())
    }
}
