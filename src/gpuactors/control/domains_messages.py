"""Between the view of compute domains and the messages of the control socket; a part of `messages.py`."""

from __future__ import annotations

from gpuactors.control.claims_messages import claims_message, claims_view
from gpuactors.control.domains_view import DomainsView, DomainView, LabelView
from gpuactors.control.pb.control import v1 as pb
from gpuactors.core.domains.report import ImexReport


def domains_message(view: DomainsView) -> pb.Domains:
    """All of a node that has to do with compute domains."""
    return pb.Domains(
        mode=view.mode,
        claims=claims_message(view.claims),
        imex=pb.Imex(
            known=view.imex.known,
            present=view.imex.present,
            clique_id=view.imex.clique_id,
            reason=view.imex.reason,
            host_problem=view.imex.host_problem,
            problem=view.imex.problem,
        ),
        label=pb.Label(
            status=view.label.status,
            value=view.label.value,
            said=view.label.said,
            problem=view.label.problem,
        ),
        domains=[
            pb.Domain(
                uid=domain.uid,
                name=domain.name,
                namespace=domain.namespace,
                status=domain.status,
                missing=domain.missing,
                labelled=domain.labelled,
                daemon_uid=domain.daemon_uid,
                readiness=domain.readiness,
                problem=domain.problem,
                since_s=domain.since_s,
                read_s=domain.read_s,
            )
            for domain in view.domains
        ],
    )


def domains_view(message: pb.Domains) -> DomainsView:
    """As `domains_message`, received. A part that is absent is as if nothing were known of it."""
    imex, label = message.imex or pb.Imex(), message.label or pb.Label()
    return DomainsView(
        mode=message.mode,
        claims=claims_view(message.claims or pb.Claims()),
        imex=ImexReport(
            imex.known, imex.present, imex.clique_id, imex.reason, imex.host_problem, imex.problem
        ),
        label=LabelView(label.status, label.value, label.said, label.problem),
        domains=tuple(
            DomainView(
                uid=domain.uid,
                name=domain.name,
                namespace=domain.namespace,
                status=domain.status,
                missing=domain.missing,
                labelled=domain.labelled,
                daemon_uid=domain.daemon_uid,
                readiness=domain.readiness,
                problem=domain.problem,
                since_s=domain.since_s,
                read_s=domain.read_s,
            )
            for domain in message.domains
        ),
    )
