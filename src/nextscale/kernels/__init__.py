"""Operations with a reference in torch and a Triton kernel each; `dispatch` says where the kernels run."""
