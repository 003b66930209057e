"""Models of timm: `model.name = "timm:resnet18"`, with timm's own options in `model.args`."""

from typing import Any

from torch import nn

from sizewise.errors import ModelError


def build(name: str, /, *, classes: int, image: tuple[int, int, int], **args: Any) -> nn.Module:
    """Return a model of timm with random weights.

    Args:
        name: What timm calls it.
        classes: Outputs.
        image: Shape of one image, (channels, height, width). Models for images of one size get it
            too, unless `args` has an `img_size`.
        args: Further arguments of timm's function, such as `depth` or `drop_rate`.
    """
    try:
        import timm
    except ImportError:
        raise ModelError("it needs timm; pip install timm") from None
    if not timm.is_model(name):
        close = ", ".join(timm.list_models(f"*{name[:5]}*")[:3])
        raise ModelError(f"timm has no model {name!r}" + (f"; it has {close}" if close else ""))
    settings = timm.get_pretrained_cfg(name)
    if settings is not None and settings.fixed_input_size:
        args = {"img_size": image[1:], **args}
    model: nn.Module = timm.create_model(
        name, pretrained=False, num_classes=classes, in_chans=image[0], **args
    )
    return model
