//! Edits, through the CUDA driver, a graph that CubeCL is recording.
//!
//! While a stream captures, its graph may be edited (CUDA driver API, `cuStreamGetCaptureInfo`).
//! The stream is accessed through types that CubeCL 0.11.3 makes public but does not document as
//! stable: [`DeviceHandle`] runs a closure on CubeCL's device thread, in order with its launches,
//! and [`WriteScoped`] gives access to that thread's streams. `Cargo.toml` therefore requires
//! exactly this version, and the device test `pdl` fails if the access no longer works.

use cubecl::client::Client;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::runtime::Runtime;
use cubecl_server::stream::WriteScoped;
use cudarc::driver::sys::{self, CUgraph, CUgraphEdgeData, CUgraphNode, CUresult, CUstream};
use std::ptr::{null, null_mut};

type Server = <CudaRuntime as Runtime>::Server;

/// The reason why an edge was not changed.
#[derive(Debug, thiserror::Error)]
pub(super) enum EdgeError {
    /// CubeCL's device thread does not run closures, or does not have the stream.
    #[error("CubeCL's device thread: {0}")]
    DeviceThread(String),
    /// A driver call failed.
    #[error("{call}: {status:?}")]
    Driver {
        call: &'static str,
        status: CUresult,
    },
}

fn checked(call: &'static str, status: CUresult) -> Result<(), EdgeError> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(EdgeError::Driver { call, status }),
    }
}

/// Makes the edge to the kernel that was launched last programmatic. Does nothing if the stream is
/// not capturing, or if the edge is not between two kernels.
pub(super) fn make_last_edge_programmatic(client: &Client) -> Result<(), EdgeError> {
    let device = DeviceHandle::<Server>::new(client.service_id().device);
    let stream = StreamId::current();
    let task = move |server: &mut Server| {
        let Some(stream) = server.write_streams().try_stream_mut(&stream) else {
            return Err(EdgeError::DeviceThread(
                "it has no stream for this thread".into(),
            ));
        };
        let Some((graph, node)) = last_node(stream.sys)? else {
            return Ok(());
        };
        make_edge_programmatic(graph, node)
    };
    device
        .submit_blocking(task)
        .map_err(|error| EdgeError::DeviceThread(format!("{error:?}")))?
}

/// Returns the graph that a stream records, and the node on which the next node depends; `None` if
/// the stream records no graph, or if there are several such nodes.
fn last_node(stream: CUstream) -> Result<Option<(CUgraph, CUgraphNode)>, EdgeError> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph, mut nodes, mut edges, mut count) =
        (0, null_mut(), null(), null(), 0usize);
    // SAFETY: the stream is CubeCL's and alive; every pointer is to a local of the right type.
    let result = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            &mut id,
            &mut graph,
            &mut nodes,
            &mut edges,
            &mut count,
        )
    };
    checked("cuStreamGetCaptureInfo", result)?;
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        || count != 1
        || nodes.is_null()
    {
        return Ok(None);
    }
    // SAFETY: the driver gave one node, valid until the next call on this stream.
    Ok(Some((graph, unsafe { *nodes })))
}

/// The data of an ordinary edge.
const ORDINARY: CUgraphEdgeData = CUgraphEdgeData {
    from_port: 0,
    to_port: 0,
    type_: 0,
    reserved: [0; 5],
};
/// The data of a programmatic edge, which fires when every block of the earlier kernel has executed
/// `griddepcontrol.launch_dependents` or exited.
const PROGRAMMATIC: CUgraphEdgeData = CUgraphEdgeData {
    from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
    type_: sys::CUgraphDependencyType_enum::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
    ..ORDINARY
};

fn make_edge_programmatic(graph: CUgraph, node: CUgraphNode) -> Result<(), EdgeError> {
    let mut count = 0usize;
    // SAFETY: the node belongs to a live graph; with null arrays only the number is returned.
    checked("cuGraphNodeGetDependencies", unsafe {
        sys::cuGraphNodeGetDependencies_v2(node, null_mut(), null_mut(), &mut count)
    })?;
    if count != 1 || !is_kernel(node)? {
        return Ok(());
    }
    let (mut before, mut edge) = (null_mut(), ORDINARY);
    // SAFETY: the arrays hold the one dependency.
    checked("cuGraphNodeGetDependencies", unsafe {
        sys::cuGraphNodeGetDependencies_v2(node, &mut before, &mut edge, &mut count)
    })?;
    if !is_kernel(before)? {
        return Ok(());
    }
    // SAFETY: graph, nodes and edge were returned by the driver; nothing else accesses the graph
    // while this runs on the thread that records it.
    unsafe {
        checked(
            "cuGraphRemoveDependencies",
            sys::cuGraphRemoveDependencies_v2(graph, &before, &node, &edge, 1),
        )?;
        let added = sys::cuGraphAddDependencies_v2(graph, &before, &node, &PROGRAMMATIC, 1);
        if added != CUresult::CUDA_SUCCESS {
            checked(
                "cuGraphAddDependencies, of the edge before",
                sys::cuGraphAddDependencies_v2(graph, &before, &node, &edge, 1),
            )?;
        }
        checked("cuGraphAddDependencies", added)
    }
}

fn is_kernel(node: CUgraphNode) -> Result<bool, EdgeError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node belongs to a live graph.
    checked("cuGraphNodeGetType", unsafe {
        sys::cuGraphNodeGetType(node, &mut kind)
    })?;
    Ok(kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL)
}
