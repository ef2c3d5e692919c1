"""The services of control.proto, from its descriptors: the calls of a client, and the handlers of a server."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from dtfm.protos import control_pb2


def stub(service: str, channel: grpc.Channel | grpc.aio.Channel) -> SimpleNamespace:
    """Returns a namespace with one call for each method of the service, like ``stub("Disk", channel).Put``."""
    described = _described(service)
    return SimpleNamespace(
        **{
            method.name: getattr(channel, _kind(method))(
                f"/{described.full_name}/{method.name}",
                GetMessageClass(method.input_type).SerializeToString,
                GetMessageClass(method.output_type).FromString,
            )
            for method in described.methods
        }
    )


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """Returns what answers the calls of the service by the servicer's methods of the same names; it must have all of them."""
    described = _described(service)
    return grpc.method_handlers_generic_handler(
        described.full_name,
        {
            method.name: getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
                getattr(servicer, method.name),
                GetMessageClass(method.input_type).FromString,
                GetMessageClass(method.output_type).SerializeToString,
            )
            for method in described.methods
        },
    )


def _described(service: str) -> ServiceDescriptor:
    found: ServiceDescriptor = control_pb2.DESCRIPTOR.services_by_name[service]
    return found


def _kind(method: MethodDescriptor) -> str:
    """As gRPC calls it, like "unary_stream"."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
