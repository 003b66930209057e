"""Models of every rank around one frozen base, which is held once and never sent."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from torch import Tensor, nn

from sizewise.exchange.plan import Submodel, TrainingStage
from sizewise.exchange.state import State
from sizewise.exchange.view import Tensors, TensorSlice, View
from sizewise.families.lora.adapters import DOWN, UP, Places, Rank, find, inject, start
from sizewise.families.lora.options import AdapterOptions
from sizewise.families.submodels import Submodels
from sizewise.torch_tools.stored import store
from sizewise.training.loop import own_tensors, trained_names
from sizewise.training.task import Task


class AdapterSubmodels(Submodels):
    """Adapters of all ranks and depths, around one base.

    Args:
        task: What is trained, and how.
        settings: What adapters are like.
        fixed: Endings of names of tensors of an adapter that do not learn: they stay as they are
            drawn, on every machine, and belong to the base.
    """

    def __init__(self, task: Task, settings: AdapterOptions, fixed: tuple[str, ...] = ()) -> None:
        super().__init__(task)
        self.settings, self.fixed = settings, fixed

    @cached_property
    def base(self) -> nn.Module:
        """The model that is adapted, with the weights that it starts from; only its head learns."""
        return self._based(self.task.pretrained())

    def _based(self, weights: Tensors) -> nn.Module:
        module = self.task.build()
        module.load_state_dict(weights, strict=False)
        heads = [module.get_submodule(path) for path in self._found(module).head]
        learned = {id(parameter) for head in heads for parameter in head.parameters()}
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in learned)
        store(module, self.settings.base)
        return module

    def base_tensors(self) -> Tensors:
        """Return all tensors of the base, as they are stored."""
        return dict(chain(self.base.named_parameters(), self.base.named_buffers()))

    def hold(self, tensors: Tensors) -> None:
        """Use a base that another process has loaded, without copying it."""
        module = vars(self).get("base") or self._based({})
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            tensor.data = tensors[name]
        self.base = module
        self.forget()  # Models that were built before have the tensors that were there before.

    @cached_property
    def places(self) -> Places:
        """Which layers get an adapter, and what learns beside them."""
        return self._found(self.base)

    def _found(self, module: nn.Module) -> Places:
        settings, classifies = self.settings, self.task.target != "next"
        return find(module, settings.targets, settings.head, classifies=classifies)

    def build(self, submodel: Rank) -> nn.Module:
        """Build adapters around the base, whose tensors are not copied."""
        module, settings = self.twin(self.base), self.settings
        inject(module, self.places, submodel, scale=settings.scale, dropout=settings.dropout)
        for name, parameter in module.named_parameters():
            if name.endswith((DOWN, UP)):
                parameter.data = parameter.data.float()  # The base may be stored in fewer bytes.
            if name.endswith(DOWN) and not parameter.is_meta:
                parameter.data = self.drawn(name, parameter.shape)
            if name.endswith(self.fixed):
                parameter.requires_grad_(False)
        return module

    def drawn(self, name: str, shape: Sequence[int], draw: int = 0) -> Tensor:
        """Return an A of a shape (r, inputs, ...) as it is drawn; a lower rank has its first rows.

        Args:
            name: That of the tensor.
            shape: Its shape.
            draw: Which of several independent draws.
        """
        rows = max(shape[0], *self.settings.ranks)
        return start(self.task.seed, name, (rows, *shape[1:]), draw)[: shape[0]].clone()

    def held(self, module: nn.Module) -> frozenset[str]:
        """Return the names of all that does not learn: every machine has it."""
        learning = tuple(name for name, p in module.named_parameters() if p.requires_grad)
        moving = trained_names(module, [TrainingStage(0.0, 0, learning)]) if learning else []
        return frozenset(own_tensors(module)).difference(moving)

    def initial(self, submodel: Submodel) -> dict[str, Tensor]:
        """Return the server's tensors of a submodel; what they start from is in the base."""
        return dict(self.extended(State({}), [submodel]).tensors)

    def slices(self, submodel: Rank) -> View:
        """Return where a submodel's tensors live: the first rows of an A, the first columns of a B.

        The head is whole.
        """
        cut, shapes = slice(0, submodel.rank), own_tensors(self.pattern(submodel))
        found = {}
        for name, place in super().slices(submodel).items():
            every = (slice(None),) * shapes[name].ndim
            if name.endswith(DOWN):
                place = TensorSlice(place.name, (cut, *every[1:]))
            elif name.endswith(UP):
                place = TensorSlice(place.name, (every[0], cut, *every[2:]))
            found[name] = place
        return found
