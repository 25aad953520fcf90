"""An operator with the name of one of Dovetail's, and one that is not complete."""

from dovetail.operators import UserOperator


class Conv2d(UserOperator):
    """Has no results and a name that is in use."""

    op_type = "Conv2d"


class Half(UserOperator):
    """Has no results and no meaning."""

    op_type = "Half"
