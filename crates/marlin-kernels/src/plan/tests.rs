use super::*;
use marlin_format::{GroupSize, QuantSpec, ScaleDtype, WeightDescriptor};

fn problem(m: usize) -> QuantProblem {
    with_spec(m, QuantSpec::int4(GroupSize::G128))
}

fn with_spec(m: usize, spec: QuantSpec) -> QuantProblem {
    QuantProblem::new(
        m,
        WeightDescriptor::plain(spec, 4096, 4096),
        ActivationDtype::F16,
    )
}

fn on(runtime: Runtime) -> Target {
    Target {
        runtime,
        card: None,
    }
}

fn cuda(capability: u32) -> Target {
    let card = Card::assumed(capability, 108, 163 * 1024);
    Target {
        card: Some(card),
        ..on(Runtime::Cuda)
    }
}

#[test]
fn units_take_as_many_rows_as_there_are_up_to_eight() {
    for (m, rows) in [
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 4),
        (5, 8),
        (8, 8),
        (9, 8),
        (4096, 8),
    ] {
        let expected = Plan::product(
            Kernel::Portable { rows },
            Reason::NoTensorCores(Runtime::Vulkan),
        );
        assert_eq!(plan(problem(m), &on(Runtime::Vulkan)), expected, "M = {m}");
    }
}

#[test]
fn flex_reads_the_packed_weight_for_any_rows() {
    for m in [1, 8, 128, 2048] {
        assert_eq!(
            plan(problem(m), &Target::FLEX),
            Plan::product(Kernel::Host, Reason::Flex)
        );
    }
}

#[test]
fn tensor_cores_take_the_layout_that_was_made_for_them() {
    for m in [1, 16, 4096] {
        let plan = plan(problem(m).in_layout(WeightLayout::Tile), &cuda(80));
        assert!(
            matches!(plan.kernel, Kernel::Marlin(launch) if launch.blocks > 0),
            "M = {m}: {plan:?}"
        );
        assert_eq!(
            plan.reason,
            Reason::TensorCores { capability: 80 },
            "M = {m}"
        );
    }
    assert_eq!(
        device_layout(&problem(1), &cuda(80)),
        problem(1).weight.in_layout(WeightLayout::Tile)
    );
}

#[test]
fn sparse_tensor_cores_take_two_of_four_and_other_devices_hold_all() {
    let sparse = problem(16).with_sparsity(Sparsity::TwoFour);
    let wide = with_spec(16, QuantSpec::int8(GroupSize::G128)).with_sparsity(Sparsity::TwoFour);
    for (problem, capability) in [sparse, wide]
        .into_iter()
        .flat_map(|problem| [80, 86, 89, 90].map(|capability| (problem, capability)))
    {
        let held = device_layout(&problem, &cuda(capability));
        assert_eq!(held, problem.weight.in_layout(WeightLayout::Tile));
        let plan = plan(
            QuantProblem {
                weight: held,
                ..problem
            },
            &cuda(capability),
        );
        assert!(
            matches!(plan.kernel, Kernel::Marlin(launch) if launch.tile.is_sparse()),
            "{problem} on {capability}: {plan:?}"
        );
    }
    let floats = QuantProblem {
        activations: ActivationDtype::F32,
        ..sparse
    };
    for (problem, target) in [
        (sparse, on(Runtime::Vulkan)),
        (wide, Target::FLEX),
        (floats, cuda(90)),
    ] {
        assert_eq!(
            device_layout(&problem, &target),
            problem.with_sparsity(Sparsity::Dense).weight,
            "{problem}"
        );
    }
}

/// Activations in e4m3 are for many rows from compute capability 8.9 on, and a norm before them is
/// computed where they are rounded. Elsewhere the activations are multiplied as they are.
#[test]
fn many_rows_are_rounded_to_e4m3_where_the_weight_allows_it() {
    let spec = QuantSpec::fp8().with_scale_dtype(ScaleDtype::F16);
    let of = |m, spec| with_spec(m, spec).in_layout(WeightLayout::Tile);
    let is_fp8 =
        |plan: &Plan| matches!(plan.kernel, Kernel::Marlin(launch) if launch.tile.is_fp8());
    let rounded = spec.with_fp8_activations(true);
    let h200 = Target {
        card: Some(Card::assumed(90, 132, 227 * 1024)),
        ..on(Runtime::Cuda)
    };
    for (group, target) in [
        (GroupSize::Channel, h200),
        (GroupSize::G128, h200),
        (GroupSize::Channel, cuda(89)),
        (GroupSize::G128, cuda(120)),
    ] {
        let many = of(4096, rounded.with_group(group)).with_prologue(Prologue::AddRmsNorm);
        let found = plan(many, &target);
        assert!(
            is_fp8(&found) && found.prologue == PrologueStage::InKernel,
            "{many} on {target:?}: {found}"
        );
    }
    let mut short = of(4096, rounded);
    short.weight.k = 4096 + 64;
    for (problem, target) in [
        (of(1, rounded), h200),
        (of(16, rounded), h200),
        (of(4096, spec), h200),
        (of(1, rounded), cuda(89)),
        (of(16, rounded), cuda(89)),
        (of(4096, rounded), cuda(86)),
        (short, h200),
    ] {
        let found = plan(problem, &target);
        assert!(!is_fp8(&found), "{problem} on {target:?}: {found}");
    }
}

#[test]
fn problems_without_tensor_cores_fall_back_and_say_why() {
    let f32 = QuantProblem {
        activations: ActivationDtype::F32,
        ..problem(1)
    };
    let mixed = QuantProblem {
        activations: ActivationDtype::BF16,
        ..problem(1)
    };
    let pair = Reason::DtypePair {
        activations: ActivationDtype::BF16,
        scales: ActivationDtype::F16,
    };
    let small = Target {
        card: Some(Card::assumed(80, 1, 1024)),
        ..on(Runtime::Cuda)
    };
    let wide = with_spec(1, QuantSpec::int8(GroupSize::G128));
    for (problem, target, reason) in [
        (
            wide,
            on(Runtime::Vulkan),
            Reason::NoTensorCores(Runtime::Vulkan),
        ),
        (f32, cuda(90), Reason::F32Activations),
        (mixed, cuda(90), pair),
        (problem(1), cuda(75), Reason::OldCard { capability: 75 }),
        (problem(1), small, Reason::NoTile),
        (
            problem(1),
            on(Runtime::Cpu),
            Reason::NoTensorCores(Runtime::Cpu),
        ),
    ] {
        // A weight for such activations may be in either layout.
        for layout in [WeightLayout::Plain, WeightLayout::Tile] {
            let expected = Plan::product(Kernel::Portable { rows: 1 }, reason);
            assert_eq!(plan(problem.in_layout(layout), &target), expected);
        }
        assert_eq!(device_layout(&problem, &target).layout, WeightLayout::Plain);
    }
    assert_eq!(plan(problem(1), &cuda(90)).reason, Reason::PlainLayout);
}

#[test]
fn a_norm_goes_into_the_kernel_of_one_row_and_before_all_others() {
    let after_norm = |m: usize| {
        problem(m)
            .in_layout(WeightLayout::Tile)
            .with_prologue(Prologue::AddRmsNorm)
    };
    let one = plan(after_norm(1), &cuda(90));
    assert!(
        matches!(one.kernel, Kernel::Gemv { .. }) && one.prologue == PrologueStage::InKernel,
        "{one:?}"
    );
    for (m, target) in [
        (2, cuda(90)),
        (1, cuda(80)),
        (1, on(Runtime::Cpu)),
        (1, Target::FLEX),
    ] {
        let found = plan(after_norm(m), &target);
        let product = plan(problem(m).in_layout(WeightLayout::Tile), &target);
        assert_eq!(
            found,
            Plan {
                prologue: PrologueStage::Before,
                ..product
            }
        );
        assert_eq!(
            found.to_string(),
            format!("rms_norm, then {}", product.kernel)
        );
    }
}

#[test]
fn swiglu_goes_into_the_kernel_where_gates_fill_tiles_and_after_all_others() {
    let gated = |m: usize, n: usize| {
        let weight = WeightDescriptor::plain(QuantSpec::int4(GroupSize::G128), 4096, n)
            .in_layout(WeightLayout::Tile);
        QuantProblem::new(m, weight, ActivationDtype::F16).with_epilogue(Epilogue::SwiGlu)
    };
    for m in [1, 2, 16, 32, 128, 4096] {
        let found = plan(gated(m, 22016), &cuda(90));
        assert_eq!(
            found.epilogue,
            EpilogueStage::InKernel,
            "M = {m}: {found:?}"
        );
        let Kernel::Marlin(launch) = found.kernel else {
            panic!("M = {m}: {found:?}")
        };
        assert!(
            launch.tile.chunks_n().is_multiple_of(2) && 22016 % launch.tile.columns() == 0,
            "M = {m}: {found:?}"
        );
    }
    let one = plan(
        gated(1, 22016).with_prologue(Prologue::AddRmsNorm),
        &cuda(90),
    );
    assert!(
        matches!(one.kernel, Kernel::Gemv { .. }) && one.epilogue == EpilogueStage::InKernel,
        "{one:?}"
    );
    let odd = plan(
        gated(1, 4096 + 2).with_prologue(Prologue::AddRmsNorm),
        &cuda(90),
    );
    assert!(
        matches!(odd.kernel, Kernel::Gemv { .. }) && odd.epilogue == EpilogueStage::After,
        "{odd:?}"
    );
    for (m, n, target) in [
        (16, 4096 + 2, cuda(90)),
        (16, 22016, on(Runtime::Cpu)),
        (1, 22016, Target::FLEX),
    ] {
        let (problem, found) = (gated(m, n), plan(gated(m, n), &target));
        let product = plan(problem.with_epilogue(Epilogue::None), &target);
        assert_eq!(
            found,
            Plan {
                epilogue: EpilogueStage::After,
                ..product
            }
        );
        assert_eq!(
            found.to_string(),
            format!("{}, then swiglu", product.kernel)
        );
    }
}

#[test]
fn the_head_takes_few_rows_of_a_float_weight() {
    let kernel = |m: usize, dtype, target: &Target| {
        plan(
            FloatProblem {
                m,
                k: 4096,
                n: 32000,
                dtype,
            },
            target,
        )
        .kernel
    };
    let (f16, f32) = (ActivationDtype::F16, ActivationDtype::F32);
    assert_eq!(
        kernel(1, f16, &cuda(90)),
        Kernel::LmHead(lm_head::LmHeadKernel::Planes)
    );
    assert_eq!(
        kernel(2, f16, &cuda(90)),
        Kernel::LmHead(lm_head::LmHeadKernel::TensorCores)
    );
    assert_eq!(
        kernel(64, f16, &cuda(80)),
        Kernel::LmHead(lm_head::LmHeadKernel::TensorCores)
    );
    assert_eq!(kernel(65, f16, &cuda(90)), Kernel::FloatMatmul);
    assert_eq!(
        kernel(4, f32, &cuda(90)),
        Kernel::LmHead(lm_head::LmHeadKernel::Planes)
    );
    assert_eq!(kernel(5, f16, &on(Runtime::Vulkan)), Kernel::FloatMatmul);
}

#[test]
fn a_converted_linear_reads_the_packed_weight_where_operations_fuse() {
    let kernel = |target: &Target| plan_converted(&problem(1), target).kernel;
    assert_eq!(kernel(&Target::FLEX), Kernel::DequantizeThenMatmul);
    assert_eq!(kernel(&on(Runtime::Cpu)), Kernel::Portable { rows: 1 });
}

#[test]
fn the_reason_names_what_decided() {
    let reason = |m, target: &Target| plan(problem(m), target).reason.to_string();
    assert!(reason(1, &on(Runtime::Vulkan)).contains("Vulkan"));
    assert!(reason(1, &cuda(75)).contains("the card has 7.5"));
    assert!(reason(1, &Target::FLEX).contains("Flex"));
}

#[test]
fn plans_of_many_lengths_are_not_kept_without_end() {
    for m in 0..2 * cache::MAX_PLANS {
        plan(problem(m), &on(Runtime::Cpu));
    }
    assert!(PLANS.len() <= cache::MAX_PLANS);
}

#[test]
fn float_projections_of_few_rows_have_kernels_of_their_own() {
    let kernel =
        |m, k, n, dtype, target: &Target| plan(FloatProblem { m, k, n, dtype }, target).kernel;
    let (bf16, card) = (ActivationDtype::BF16, cuda(90));
    let tensor_cores = Kernel::LmHead(lm_head::LmHeadKernel::TensorCores);
    let planes = Kernel::LmHead(lm_head::LmHeadKernel::Planes);
    for (m, k, n, expected) in [
        (1, 2880, 32, Kernel::FloatGemv),
        (1, 2880, 5120, Kernel::FloatGemv),
        (1, 8200, 32, planes),
        (1, 2880, 201_088, planes),
        (2, 2880, 32, Kernel::FewColumns),
        (8, 2880, 5120, Kernel::FewColumns),
        (9, 2880, 5120, tensor_cores),
        (128, 2880, 32, Kernel::FewColumns),
    ] {
        assert_eq!(kernel(m, k, n, bf16, &card), expected, "{m} x {k} x {n}");
    }
    assert_eq!(kernel(1, 2880, 32, ActivationDtype::F32, &card), planes);
    assert_eq!(kernel(1, 2880, 32, bf16, &Target::FLEX), Kernel::Host);
}
