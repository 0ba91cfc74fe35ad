//! The commands that install what is missing.

use std::fs;

/// A library or tool that the program loads at run time.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(all(feature = "cuda", feature = "vulkan")),
    allow(dead_code, reason = "each runtime looks for its own packages")
)]
pub enum Package {
    /// NVIDIA's driver, with libcuda.
    CudaDriver,
    /// NVRTC and the CUDA headers.
    CudaToolkit,
    /// The Vulkan loader and Mesa's drivers.
    Vulkan,
}

/// Returns the command that installs a package on this system.
pub fn install(package: Package) -> &'static str {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    command(System::of(&release), package)
}

/// A family of Linux distributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    Debian,
    Ubuntu,
    Fedora,
    Arch,
    Other,
}

impl System {
    /// Returns the family that the text of an os-release file names.
    fn of(release: &str) -> Self {
        let value = |field: &str| {
            let value = release.lines().find_map(|line| line.strip_prefix(field));
            value.unwrap_or_default().trim_matches('"').to_owned()
        };
        let names = format!("{} {}", value("ID="), value("ID_LIKE="));
        let systems = names.split_whitespace().filter_map(|name| match name {
            "debian" => Some(Self::Debian),
            "ubuntu" => Some(Self::Ubuntu),
            "fedora" | "rhel" | "centos" => Some(Self::Fedora),
            "arch" => Some(Self::Arch),
            _ => None,
        });
        systems.into_iter().next().unwrap_or(Self::Other)
    }
}

fn command(system: System, package: Package) -> &'static str {
    use Package::{CudaDriver, CudaToolkit, Vulkan};
    match (system, package) {
        (System::Debian, CudaDriver) => "sudo apt install nvidia-driver",
        (System::Ubuntu, CudaDriver) => "sudo ubuntu-drivers install",
        (System::Fedora, CudaDriver) => "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda",
        (System::Arch, CudaDriver) => "sudo pacman -S nvidia",
        (System::Other, CudaDriver) => "install the driver from https://www.nvidia.com/drivers",
        (System::Debian | System::Ubuntu, CudaToolkit) => "sudo apt install nvidia-cuda-toolkit",
        (System::Fedora, CudaToolkit) => "sudo dnf install cuda-toolkit",
        (System::Arch, CudaToolkit) => "sudo pacman -S cuda",
        (System::Other, CudaToolkit) => {
            "install the toolkit from https://developer.nvidia.com/cuda-downloads"
        }
        (System::Debian | System::Ubuntu, Vulkan) => {
            "sudo apt install libvulkan1 mesa-vulkan-drivers"
        }
        (System::Fedora, Vulkan) => "sudo dnf install vulkan-loader mesa-vulkan-drivers",
        (System::Arch, Vulkan) => "sudo pacman -S vulkan-icd-loader vulkan-radeon",
        (System::Other, Vulkan) => "install the card's driver, which has a Vulkan driver",
    }
}

#[cfg(test)]
mod tests {
    use super::System;

    #[test]
    fn systems_are_known_by_name_or_family() {
        let systems = [
            ("NAME=\"Debian GNU/Linux\"\nID=debian\n", System::Debian),
            ("ID=ubuntu\nID_LIKE=debian\n", System::Ubuntu),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", System::Ubuntu),
            (
                "ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n",
                System::Fedora,
            ),
            ("ID=arch\n", System::Arch),
            ("ID=void\n", System::Other),
            ("", System::Other),
        ];
        for (release, system) in systems {
            assert_eq!(System::of(release), system, "{release}");
        }
    }
}
