"""mxep.gemm"""
