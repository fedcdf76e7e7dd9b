import torch

from evenstep.events import Incident, MicrobatchEvent


def test_an_incident_can_be_written_whatever_the_name_of_a_file_in_it() -> None:
    said = "no such file: caf\udce9.png"
    incident = Incident(kind="x", update=1, message=said, traceback=said)
    assert (incident.message, incident.traceback) == ("no such file: caf\\udce9.png",) * 2


def test_of_an_error_that_holds_a_whole_tensor_an_incident_keeps_its_beginning_and_its_end() -> None:
    said = f"ValueError: of {'x' * 3_000_000} the last"
    incident = Incident(kind="x", update=1, message=said, traceback=said)
    for text in (incident.message, incident.traceback):
        assert len(text) < 20_100
        assert text.startswith("ValueError: of xxx") and text.endswith("xxx the last")
        assert "2,980,024 characters are left out here" in text


def test_micro_batch_events_with_tensors_can_be_compared_and_shown() -> None:
    one, other = (
        MicrobatchEvent(update=1, microbatch=0, batch=torch.ones(2), output=torch.ones(2) * n, loss=None)
        for n in (1, 2)
    )
    assert one == other
    assert repr(one) == "MicrobatchEvent(update=1, microbatch=0, task='')"
